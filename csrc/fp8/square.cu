// FP8 with one scale for the matrix or, with LPQ_SQUARE, for each 128 x 128 block: see matrix.cuh. The column operand has
// the row operand's bytes, transposed. LPQ_ROW, LPQ_COL: the element type of the operands that are wanted. LPQ_FILLED:
// lines of scales are filled up to multiples of 4.
#include "matrix.cuh"

#ifdef LPQ_ROW
typedef LPQ_ROW F;
#else
typedef LPQ_COL F;
#endif
#ifdef LPQ_SQUARE
constexpr bool SQUARE = true;
#else
constexpr bool SQUARE = false;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, fitting<REGISTERS>) quantize(
    const void* x, u8* row_data, float* row_scale, u8* col_data, float* col_scale, const u32* amaxes, u32 count,
    u32* known, u32* measured, float largest_scale, u32 pow2, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    // Backwards: what was read last to measure the amax may still be in the cache.
    const Tile t(rows, cols, gridDim.x - 1 - blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
    struct Shared {
        fp8::InBlock in_block;
#ifdef LPQ_COL
        Transposed transposed;
#endif
    };
    Shared& shared = in_shared_memory<Shared>();
    const fp8::Place<SQUARE> at(t);
    const fp8::Matrix matrix = {row_data, row_scale, amaxes, count, known, measured, largest_scale, pow2};
#ifdef LPQ_ROW
    const fp8::Factor factor = fp8::tile_factor<F>(matrix, w, at, at.in_row, shared.in_block);
    if (at.writes) row_scale[at.scale_in_row] = __frcp_rn(factor.of);
#else
    const fp8::Factor factor = fp8::tile_factor<F>(matrix, w, at, at.in_col, shared.in_block);
#endif
#ifdef LPQ_COL
    if (at.writes) col_scale[at.scale_in_col] = __frcp_rn(factor.of);
#endif
    fp8::tell_amax<SQUARE>(matrix, w, shared.in_block);
    u32 low[ROWS], high[ROWS];
    fp8::scale_rows<F, SQUARE>(w, factor, low, high);
#ifdef LPQ_ROW
#pragma unroll
    for (int i = 0; i < ROWS; ++i) store_row(t, row_data, i, low[i], high[i]);
#endif
#ifdef LPQ_COL
    shared.transposed.put_rows(t, low, high);
    __syncthreads();
#else
    if (measured) __syncthreads();
#endif
    fp8::raise_amax<SQUARE>(matrix, shared.in_block);
#ifdef LPQ_COL
    shared.transposed.store(t, col_data);
#endif
}
