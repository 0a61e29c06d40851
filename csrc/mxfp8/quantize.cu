// MXFP8: both operands of a tile from one read. LPQ_ROW, LPQ_COL: E4M3 or E5M2 where the operand is wanted.
//
// A null pointer leaves its part out: without data only the amaxes are measured. An amax that is given takes the
// place of the block's own. If there are `words`, the exponents go there, tile by tile: see untile.cu.
#include "tile.cuh"

// The exponent byte of a block: the least power of two that brings its amax into range; 255 unless it is finite.
template <class F>
__device__ __forceinline__ u32 exponent_of(float amax) {
    const u32 bits = __float_as_uint(__fmul_rn(amax, (float)(1.0 / (F::mantissa == 3 ? 448.0 : 57344.0))));
    return bits <= 0x400000u ? 0 : min((bits + 0x7fffffu) >> 23, 255u);
}

// 2^(127 - exponent).
__device__ __forceinline__ float inverse_of(u32 exponent) {
    return __uint_as_float(exponent < 254 ? (254 - exponent) << 23 : exponent == 254 ? 0x400000u : 0x200000u);
}

// Scales of 8 blocks: their exponents go to shared memory, and where the statistics live is read or written.
template <class F>
__device__ __forceinline__ void scales(
    const u32 (&amax)[WORDS], const float* given, float* measured, bool first, int count, i64 begin, i64 block,
    i64 blocks, u8* exponents, float (&inverse)[8]
) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float a = value(amax, i);
        const bool inside = i < count && block < blocks;
        if (measured && first && inside) measured[(begin + i) * blocks + block] = __uint_as_float(amax_bits(a));
        if (given) a = inside ? given[(begin + i) * blocks + block] : 0.0f;
        const u32 exponent = exponent_of<F>(a);
        inverse[i] = inverse_of(exponent);
        if (first) exponents[i * 4] = (u8)exponent;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LPQ_INPUT == LPQ_FP32 ? 2 : 3) quantize(
    const void* x, u8* row_data, u8* row_scale, u8* col_data, u8* col_scale, const float* row_given,
    const float* col_given, float* row_measured, float* col_measured, u32* words, i64 rows, i64 cols
) {
    __shared__ alignas(4) u8 row_exponents[TILE][4], col_exponents[TILE][4];
    const Tile t(rows, cols, blockIdx.x);
    u32 w[8][WORDS];
    load(t, x, w);
    const i64 row_blocks = (cols + 31) / 32, col_blocks = (rows + 31) / 32;
    u32 amax[WORDS];
    float inverse[8];
#ifdef LPQ_ROW
    row_amax(w, amax);
    reduce_lanes<1, 2>(amax);
    scales<LPQ_ROW>(amax, row_given, row_measured, t.lane_col % 32 == 0, t.high, t.row, t.col / 32, row_blocks,
                    &row_exponents[t.lane_row][t.lane_col / 32], inverse);
    if (row_data) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 pair[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                pair[j] = scale_pair<LPQ_ROW>(value(w[i], 2 * j), inverse[i], value(w[i], 2 * j + 1), inverse[i]);
            store_row(t, row_data, i, pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
        }
    }
#endif
#ifdef LPQ_COL
    __shared__ Transposed transposed;
    col_amax(w, amax);
    reduce_lanes<8, 16>(amax);
    scales<LPQ_COL>(amax, col_given, col_measured, t.lane_row % 32 == 0, t.wide, t.col, t.row / 32, col_blocks,
                    &col_exponents[t.lane_col][t.lane_row / 32], inverse);
    if (col_data) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pair[i] = scale_pair<LPQ_COL>(value(w[2 * i], j), inverse[j], value(w[2 * i + 1], j), inverse[j]);
            transposed.put(t, j, pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
        }
    }
#endif
    __syncthreads();
#ifdef LPQ_COL
    if (col_data) transposed.store(t, col_data);
#endif
    const int line = threadIdx.x % TILE;
    if (words) {
        const auto& exponents = threadIdx.x < TILE ? row_exponents : col_exponents;
        store_piece(words + (i64)blockIdx.x * (2 * TILE) + threadIdx.x, *(const u32*)exponents[line]);
        return;
    }
    const i64 row = (i64)t.down * TILE + line, col = (i64)t.across * TILE + line;
#ifdef LPQ_ROW
    if (row_data && threadIdx.x < TILE && row < rows)
        store_4_bytes(row_scale + row * row_blocks, t.across * (i64)4, row_blocks, *(u32*)row_exponents[line]);
#endif
#ifdef LPQ_COL
    if (col_data && threadIdx.x >= TILE && col < cols)
        store_4_bytes(col_scale + col * col_blocks, t.down * (i64)4, col_blocks, *(u32*)col_exponents[line]);
#endif
}
