// FP8 with a scale for each row of an operand, or with LPQ_BLOCKS for each 128 elements of one. LPQ_ROW, LPQ_COL: the
// element type of the operands that are wanted; a null pointer leaves an operand's data out.
//
// If there are `words`, the scales of blocks go there, tile by tile: see untile.cu.
//
// Amaxes that are given are used; those of blocks are measured here if they are not, and written where asked.
#include "scale.cuh"
#include "tile.cuh"

// The largest magnitudes of the rows and columns of a tile, as fp32 bits: what each warp found.
struct Lines {
    u32 row[2][TILE], col[4][TILE];

    __device__ __forceinline__ void find_rows(const Tile& t, const u32 (&w)[8][WORDS]) {
        u32 amax[WORDS];
        row_amax(w, amax);
        reduce_lanes<1, 4>(amax);
        if (t.lane_col % 64 == 0)
#pragma unroll
            for (int i = 0; i < 8; ++i) row[t.lane_col / 64][t.lane_row + i] = amax_bits(value(amax, i));
    }
    __device__ __forceinline__ void find_cols(const Tile& t, const u32 (&w)[8][WORDS]) {
        u32 amax[WORDS];
        col_amax(w, amax);
        reduce_lanes<8, 16>(amax);
        if (t.lane_row % 32 == 0)
#pragma unroll
            for (int i = 0; i < 8; ++i) col[t.lane_row / 32][t.lane_col + i] = amax_bits(value(amax, i));
    }
    __device__ __forceinline__ u32 of_row(int i) const { return max(row[0][i], row[1][i]); }
    __device__ __forceinline__ u32 of_col(int i) const {
        return max(max(col[0][i], col[1][i]), max(col[2][i], col[3][i]));
    }
};

// The amax of each row and of each column of a matrix; null leaves one out. They must be 0 before.
extern "C" __global__ void __launch_bounds__(THREADS, LPQ_INPUT == LPQ_FP32 ? 2 : 4) amax(
    const void* x, u32* row_amaxes, u32* col_amaxes, i64 rows, i64 cols
) {
    __shared__ Lines lines;
    const Tile t(rows, cols, blockIdx.x);
    u32 w[8][WORDS];
    load(t, x, w);
    if (row_amaxes) lines.find_rows(t, w);
    if (col_amaxes) lines.find_cols(t, w);
    __syncthreads();
    const int line = threadIdx.x % TILE;
    const i64 row = (i64)t.down * TILE + line, col = (i64)t.across * TILE + line;
    if (row_amaxes && threadIdx.x < TILE && row < rows) atomicMax(row_amaxes + row, lines.of_row(line));
    if (col_amaxes && threadIdx.x >= TILE && col < cols) atomicMax(col_amaxes + col, lines.of_col(line));
}

// One line of one operand: its scale, from its own amax or a given one.
__device__ __forceinline__ float line_scale(
    u32 own, const u32* given, u32* measured, float* scale_to, u32* word, i64 place, bool writes, float largest,
    float largest_scale, u32 pow2
) {
    const u32 amax = given ? given[place] : own;
    const float scale = scale_from_amax(amax, largest, largest_scale, pow2);
    if (writes) {
        if (measured) measured[place] = own;
        store_piece(word ? word : (u32*)scale_to + place, __float_as_uint(__frcp_rn(scale)));
    }
    return scale;
}

extern "C" __global__ void __launch_bounds__(THREADS, LPQ_INPUT == LPQ_FP32 ? 2 : 3) quantize(
    const void* x, u8* row_data, float* row_scale, u8* col_data, float* col_scale, const u32* row_given,
    const u32* col_given, u32* row_measured, u32* col_measured, u32* words, float largest_scale, u32 row_pow2,
    u32 col_pow2, i64 rows, i64 cols
) {
    __shared__ Lines lines;
    __shared__ alignas(16) float row_scales[TILE], col_scales[TILE];
    const Tile t(rows, cols, gridDim.x - 1 - blockIdx.x);
    u32 w[8][WORDS];
    load(t, x, w);
#ifdef LPQ_BLOCKS
    const i64 across = t.across, row_blocks = (cols + TILE - 1) / TILE;
    const i64 down = t.down, col_blocks = (rows + TILE - 1) / TILE;
#ifdef LPQ_ROW
    if (!row_given || row_measured) lines.find_rows(t, w);
#endif
#ifdef LPQ_COL
    if (!col_given || col_measured) lines.find_cols(t, w);
#endif
    __syncthreads();
#else
    const i64 across = 0, row_blocks = 1, down = 0, col_blocks = 1;
#endif
    const int line = threadIdx.x % TILE;
    const i64 row = (i64)t.down * TILE + line, col = (i64)t.across * TILE + line;
    u32* word = words ? words + (i64)(gridDim.x - 1 - blockIdx.x) * (2 * TILE) + threadIdx.x : nullptr;
#ifdef LPQ_ROW
    if (threadIdx.x < TILE && row < rows)
        row_scales[line] = line_scale(
            lines.of_row(line), row_given, row_measured, row_scale, word, row * row_blocks + across,
            row_blocks > 1 || t.across == 0, largest_value<LPQ_ROW>(), largest_scale, row_pow2);
#endif
#ifdef LPQ_COL
    if (threadIdx.x >= TILE && col < cols)
        col_scales[line] = line_scale(
            lines.of_col(line), col_given, col_measured, col_scale, word, col * col_blocks + down,
            col_blocks > 1 || t.down == 0, largest_value<LPQ_COL>(), largest_scale, col_pow2);
#endif
    __syncthreads();
#ifdef LPQ_ROW
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float scale = row_scales[t.lane_row + i];
        u32 pair[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            pair[j] = scale_pair<LPQ_ROW>(value(w[i], 2 * j), scale, value(w[i], 2 * j + 1), scale);
        store_row(t, row_data, i, pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    }
#endif
#ifdef LPQ_COL
    __shared__ Transposed transposed;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float scale = col_scales[t.lane_col + j];
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
