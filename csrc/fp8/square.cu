// FP8 with one scale for the matrix or, with LPQ_SQUARE, for each 128 x 128 block. The column operand has the row
// operand's bytes, transposed. LPQ_ROW, LPQ_COL: the element type of the operands that are wanted.
//
// Without LPQ_SQUARE the amax is the largest of `amaxes` (count of them), and `measured`, if wanted, gets the amax of
// each tile. With it, `amaxes` are those of the blocks, or null to use the block's own.
#include "scale.cuh"
#include "tile.cuh"

#ifdef LPQ_ROW
typedef LPQ_ROW F;
#else
typedef LPQ_COL F;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, LPQ_INPUT == LPQ_FP32 ? 2 : 4) quantize(
    const void* x, u8* row_data, float* row_scale, u8* col_data, float* col_scale, const u32* amaxes, u32 count,
    u32* measured, float largest_scale, u32 pow2, i64 rows, i64 cols
) {
    // Backwards: what was read last to measure the amax may still be in the cache.
    const Tile t(rows, cols, gridDim.x - 1 - blockIdx.x);
    u32 w[8][WORDS];
    load(t, x, w);
    const i64 in_row_scale = t.down * ((cols + TILE - 1) / TILE) + t.across;
    const i64 in_col_scale = t.across * ((rows + TILE - 1) / TILE) + t.down;
    u32 amax = 0;
#ifdef LPQ_SQUARE
#ifdef LPQ_ROW
    const i64 place = in_row_scale;
#else
    const i64 place = in_col_scale;
#endif
    if (measured || !amaxes) amax = block_max(thread_amax(w));
    if (measured && threadIdx.x == 0) measured[place] = amax;
    if (amaxes) amax = amaxes[place];
    const bool writes = threadIdx.x == 0;
    float* row_to = row_scale + in_row_scale;
    float* col_to = col_scale + in_col_scale;
#else
    amax = largest_of(amaxes, count);
    u32 own = measured ? thread_amax(w) : 0;
    const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
    float *row_to = row_scale, *col_to = col_scale;
#endif
    const float scale = scale_from_amax(amax, largest_value<F>(), largest_scale, pow2);
    if (writes) {
#ifdef LPQ_ROW
        *row_to = __frcp_rn(scale);
#endif
#ifdef LPQ_COL
        *col_to = __frcp_rn(scale);
#endif
    }
    u32 low[8], high[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 pair[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) pair[j] = scale_pair<F>(value(w[i], 2 * j), scale, value(w[i], 2 * j + 1), scale);
        low[i] = pair[0] | pair[1] << 16, high[i] = pair[2] | pair[3] << 16;
#ifdef LPQ_ROW
        store_row(t, row_data, i, low[i], high[i]);
#endif
    }
#ifdef LPQ_COL
    __shared__ Transposed transposed;
    transposed.put_rows(t, low, high);
    __syncthreads();
    transposed.store(t, col_data);
#endif
#ifndef LPQ_SQUARE
    if (measured) {
        own = block_max(own);
        if (threadIdx.x == 0) measured[blockIdx.x] = own;
    }
#endif
}
