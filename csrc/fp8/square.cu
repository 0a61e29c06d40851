// FP8 with one scale for the matrix or, with LPQ_SQUARE, for each 128 x 128 block. The column operand has the row
// operand's bytes, transposed. LPQ_ROW, LPQ_COL: the element type of the operands that are wanted.
//
// Without LPQ_SQUARE the amax is the largest of `amaxes` (count of them), which goes to `known` if that is wanted, and
// `measured`, which must be 0 before, gets the amax of the matrix. With it, `amaxes` are those of the blocks, or null
// to use the blocks' own, which go to `measured` if that is wanted.
#include "scale.cuh"
#include "tile.cuh"

#ifdef LPQ_ROW
typedef LPQ_ROW F;
#else
typedef LPQ_COL F;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, fitting<REGISTERS>) quantize(
    const void* x, u8* row_data, float* row_scale, u8* col_data, float* col_scale, const u32* amaxes, u32 count,
    u32* known, u32* measured, float largest_scale, u32 pow2, i64 rows, i64 cols
) {
    // Backwards: what was read last to measure the amax may still be in the cache.
    const Tile t(rows, cols, gridDim.x - 1 - blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
#ifdef LPQ_SQUARE
    constexpr int SQUARE_WARPS = WIDE / WARP_ROWS;
    const i64 down = t.row / WIDE, across = t.across;
    const i64 in_row_scale = down * ((cols + WIDE - 1) / WIDE) + across;
    const i64 in_col_scale = across * ((rows + WIDE - 1) / WIDE) + down;
#ifdef LPQ_ROW
    const i64 place = in_row_scale;
#else
    const i64 place = in_col_scale;
#endif
    const bool inside = down * WIDE < rows, writes = inside && threadIdx.x % (SQUARE_WARPS * 32) == 0;
    u32 amax = 0;
    if (measured || !amaxes) amax = group_max(thread_amax(w), SQUARE_WARPS);
    if (measured && writes) measured[place] = amax;
    if (amaxes) amax = inside ? amaxes[place] : 0;
#else
    constexpr i64 in_row_scale = 0, in_col_scale = 0;
    const u32 amax = largest_of(amaxes, count);
    const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
    if (writes && known) *known = amax;
    if (measured) {  // few tiles have a larger one than was found before
        const u32 own = block_max(thread_amax(w));
        if (threadIdx.x == 0 && own > *(volatile u32*)measured) atomicMax(measured, own);
    }
#endif
    const float scale = scale_from_amax(amax, largest_value<F>(), largest_scale, pow2);
    if (writes) {
#ifdef LPQ_ROW
        row_scale[in_row_scale] = __frcp_rn(scale);
#endif
#ifdef LPQ_COL
        col_scale[in_col_scale] = __frcp_rn(scale);
#endif
    }
    u32 low[ROWS], high[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
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
}
