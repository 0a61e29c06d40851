// FP8 with a scale for each row of an operand, or with LPQ_BLOCKS for each 128 elements of one. LPQ_ROW, LPQ_COL: the
// element type of the operands that are wanted.
//
// Amaxes that are given are used; those of blocks are measured here if they are not, and written where asked. If there
// are `words`, the scales of blocks go there: see untile.cu.
#include "scale.cuh"
#include "tile.cuh"

constexpr int BLOCKS_DOWN = (TALL + WIDE - 1) / WIDE;  // of 128 rows in a tile
constexpr int BLOCK_WARPS = WARPS / BLOCKS_DOWN;

// The largest magnitude of each row of a tile, as fp32 bits.
__device__ __forceinline__ void find_rows(const Tile& t, const u32 (&w)[ROWS][WORDS], u32 (&rows)[TALL]) {
    u32 amax[LINES];
    row_amax(w, amax);
    reduce_lanes<1, 8>(amax);
    if (t.lane_col == 0)
#pragma unroll
        for (int i = 0; i < ROWS; ++i) rows[t.lane_row + i] = amax_bits(value(amax, i));
}

__device__ __forceinline__ void find_cols(const Tile& t, const u32 (&w)[ROWS][WORDS], Columns& columns) {
    u32 amax[WORDS];
    col_amax(w, amax);
    reduce_lanes<16, 16>(amax);
    columns.put(t, amax);
}

// The amax of each row and of each column of a matrix; null leaves one out. They must be 0 before.
extern "C" __global__ void __launch_bounds__(THREADS, fitting<REGISTERS>) amax(
    const void* x, u32* row_amaxes, u32* col_amaxes, i64 rows, i64 cols
) {
    __shared__ u32 of_rows[TALL];
    __shared__ Columns columns;
    const Tile t(rows, cols, blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
    if (row_amaxes) find_rows(t, w, of_rows);
    if (col_amaxes) find_cols(t, w, columns);
    __syncthreads();
    const int line = (int)threadIdx.x - (THREADS - WIDE);
    const i64 row = (i64)t.down * TALL + threadIdx.x, col = (i64)t.across * WIDE + line;
    if (row_amaxes && threadIdx.x < TALL && row < rows) atomicMax(row_amaxes + row, of_rows[threadIdx.x]);
    if (col_amaxes && line >= 0 && col < cols) atomicMax(col_amaxes + col, columns.largest(line, 0, WARPS));
}

// One line of one operand: its scale, from its own amax or a given one.
__device__ __forceinline__ float line_scale(
    u32 own, const u32* given, u32* measured, u32* scale_to, i64 place, bool writes, float largest,
    float largest_scale, u32 pow2
) {
    const u32 amax = given ? given[place] : own;
    const float scale = scale_from_amax(amax, largest, largest_scale, pow2);
    if (writes) {
        if (measured) measured[place] = own;
        store_piece(scale_to, __float_as_uint(__frcp_rn(scale)));
    }
    return scale;
}

extern "C" __global__ void __launch_bounds__(THREADS, fitting<TALL == WIDE ? 80 : REGISTERS>) quantize(
    const void* x, u8* row_data, float* row_scale, u8* col_data, float* col_scale, const u32* row_given,
    const u32* col_given, u32* row_measured, u32* col_measured, u32* words, float largest_scale, u32 row_pow2,
    u32 col_pow2, i64 rows, i64 cols
) {
    const Tile t(rows, cols, gridDim.x - 1 - blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
#ifdef LPQ_ROW
    __shared__ u32 of_rows[TALL];
    __shared__ alignas(16) float row_scales[TALL];
#endif
#ifdef LPQ_COL
    __shared__ Columns columns;
    __shared__ alignas(16) float col_scales[BLOCKS_DOWN][WIDE];
    __shared__ Transposed transposed;
#endif
#ifdef LPQ_BLOCKS
    const i64 across = t.across, row_blocks = (cols + WIDE - 1) / WIDE, col_blocks = (rows + WIDE - 1) / WIDE;
#ifdef LPQ_ROW
    if (!row_given || row_measured) find_rows(t, w, of_rows);
#endif
#ifdef LPQ_COL
    if (!col_given || col_measured) find_cols(t, w, columns);
#endif
    __syncthreads();
#else
    const i64 across = 0, row_blocks = 1, col_blocks = 1;
#endif
#ifdef LPQ_ROW
    const i64 row = (i64)t.down * TALL + threadIdx.x;
    const i64 row_place = row * row_blocks + across;
    if (threadIdx.x < TALL && row < rows)
        row_scales[threadIdx.x] = line_scale(
            of_rows[threadIdx.x], row_given, row_measured,
            words ? word_of(t, words, threadIdx.x / WIDE, threadIdx.x % WIDE) : (u32*)row_scale + row_place, row_place,
            row_blocks > 1 || t.across == 0, largest_value<LPQ_ROW>(), largest_scale, row_pow2);
#endif
#ifdef LPQ_COL
    const int line = (int)threadIdx.x - (THREADS - BLOCKS_DOWN * WIDE), in_tile = line / WIDE;
    const i64 col = (i64)t.across * WIDE + line % WIDE, down = (i64)t.down * BLOCKS_DOWN + in_tile;
    const i64 col_place = col * col_blocks + (col_blocks > 1 ? down : 0);
    if (line >= 0 && col < cols && down * WIDE < rows)
        col_scales[in_tile][line % WIDE] = line_scale(
            columns.largest(line % WIDE, in_tile * BLOCK_WARPS, BLOCK_WARPS), col_given, col_measured,
            words ? word_of(t, words, in_tile, WIDE + line % WIDE) : (u32*)col_scale + col_place, col_place,
            col_blocks > 1 || down == 0, largest_value<LPQ_COL>(), largest_scale, col_pow2);
#endif
    __syncthreads();
#ifdef LPQ_ROW
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const float scale = row_scales[t.lane_row + i];
        u32 pair[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            pair[j] = scale_pair<LPQ_ROW>(value(w[i], 2 * j), scale, value(w[i], 2 * j + 1), scale);
        store_row(t, row_data, i, pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    }
#endif
#ifdef LPQ_COL
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float scale = col_scales[t.lane_row / WIDE][t.lane_col + j];
        u32 pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pair[i] = scale_pair<LPQ_COL>(value(w[2 * i], j), scale, value(w[2 * i + 1], j), scale);
        transposed.put(t, j, pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    }
    __syncthreads();
    transposed.store(t, col_data);
#endif
}
