// FP8 with a scale for each row of an operand, or with LPQ_BLOCKS for each 128 elements of one, which with LPQ_POW2 is a
// power of two. LPQ_ROW, LPQ_COL: the element type of the operands that are wanted.
#include "lines.cuh"

#ifdef LPQ_BLOCKS
constexpr bool BLOCKS = true;
#else
constexpr bool BLOCKS = false;
#endif
#ifdef LPQ_POW2
constexpr bool POW2 = true;
#else
constexpr bool POW2 = false;
#endif

// Registers of a thread: fewer threads at a time are faster than threads that run short of them.
constexpr int NEEDS = TALL == UNIT && PER_WORD == 2 ? 80 : REGISTERS;

extern "C" __global__ void __launch_bounds__(THREADS, fitting<NEEDS>) quantize(
    const void* x, u8* row_data, float* row_scale, u8* col_data, float* col_scale, const u32* row_given,
    const u32* col_given, u32* row_measured, u32* col_measured, float largest_scale, u32 row_pow2, u32 col_pow2, i64 rows,
    i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, gridDim.x - 1 - blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
    struct Shared {
#ifdef LPQ_ROW
        fp8::RowLines<LPQ_ROW, BLOCKS, POW2>::Shared row;
#endif
#ifdef LPQ_COL
        fp8::ColLines<LPQ_COL, BLOCKS, POW2>::Shared col;
#endif
    };
    Shared& shared = in_shared_memory<Shared>();
#ifdef LPQ_ROW
    fp8::RowLines<LPQ_ROW, BLOCKS, POW2> row(
        {row_data, row_scale, row_given, row_measured, largest_scale, row_pow2}, shared.row, t);
    row.find(t, w);
#endif
#ifdef LPQ_COL
    fp8::ColLines<LPQ_COL, BLOCKS, POW2> col(
        {col_data, col_scale, col_given, col_measured, largest_scale, col_pow2}, shared.col, t);
    col.find(t, w);
#endif
#ifdef LPQ_ROW
    if (!row.WAITS) row.encode(t, w);
#endif
#if defined(LPQ_COL) || !defined(LPQ_POW2)
    if (BLOCKS) __syncthreads();
#ifdef LPQ_ROW
    row.scale(t);
#endif
#ifdef LPQ_COL
    col.scale(t);
#endif
    __syncthreads();
#ifdef LPQ_ROW
    if (row.WAITS) row.encode(t, w);
#endif
#ifdef LPQ_COL
#pragma unroll
    for (int i = 0; i < ROWS; ++i) keep_apart(w[i]);
    col.encode(t, w);
    __syncthreads();
    col.store(t);
#endif
#endif
}
