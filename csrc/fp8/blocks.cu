// FP8: the amaxes of blocks alone: of 128 elements along the rows and along the columns, or with LPQ_SQUARE of 128x128 in the
// order of one operand. A null pointer leaves an operand out.
#include "lines.cuh"
#include "matrix.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, fitting<REGISTERS>) amax(
    const void* x, u32* of_rows, u32* of_cols, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
#ifdef LPQ_SQUARE
    __shared__ Largest largest;
    const fp8::Place<true> at(t);
    largest.put(thread_amax(w));
    fp8::wait_for_the_units();
    const u32 found = fp8::of_unit(largest);
    if (at.writes) *(of_rows ? of_rows + at.in_row : of_cols + at.in_col) = found;
#else
    __shared__ Columns columns;
    if (of_cols) find_cols(t, w, columns);
    if (of_rows) {
        const i64 blocks = (cols + UNIT - 1) / UNIT;
        u32 found[LINES];
        row_amax(w, found);
        reduce_lanes<1, 8>(found);
        if (t.lane_col % UNIT == 0 && t.wide)
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if (i < t.high) store_piece(of_rows + (t.row + i) * blocks + t.col / UNIT, amax_bits(value(found, i)));
    }
    if (of_cols) {
        __syncthreads();
        constexpr int IN_UNIT = WARPS / fp8::UNITS_DOWN;  // warps
        const int unit = threadIdx.x / WIDE, line = threadIdx.x % WIDE;
        const i64 col = (i64)t.across * WIDE + line, down = (i64)t.down * fp8::UNITS_DOWN + unit;
        if (unit < fp8::UNITS_DOWN && col < cols && down * UNIT < rows)
            store_piece(of_cols + col * ((rows + UNIT - 1) / UNIT) + down, columns.largest(line, unit * IN_UNIT, IN_UNIT));
    }
#endif
}
