// MXFP8: both operands of a tile from one read. LPQ_ROW, LPQ_COL: E4M3 or E5M2 where the operand is wanted.
//
// A null pointer leaves its part out: without data only the amaxes are measured. An amax that is given takes the
// place of the block's own, which LPQ_STATS allows for. If there are `words`, the exponents go there: see untile.cu.
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

// Scales of blocks in N lines: their exponents go to shared memory, `apart` bytes from line to line, and where the
// statistics live is read or written.
template <class F, int N, int WORDS_OF_N>
__device__ __forceinline__ void scales(
    const u32 (&amax)[WORDS_OF_N], const float* given, float* measured, bool first, int count, i64 begin, i64 block,
    i64 blocks, u8* exponents, int apart, float (&inverse)[N]
) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float a = value(amax, i);
#ifdef LPQ_STATS
        const bool inside = i < count && block < blocks;
        if (measured && first && inside) measured[(begin + i) * blocks + block] = __uint_as_float(amax_bits(a));
        if (given) a = inside ? given[(begin + i) * blocks + block] : 0.0f;
#endif
        const u32 exponent = exponent_of<F>(a);
        inverse[i] = inverse_of(exponent);
        if (first) exponents[i * apart] = (u8)exponent;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, fitting<REGISTERS>) quantize(
    const void* x, u8* row_data, u8* row_scale, u8* col_data, u8* col_scale, const float* row_given,
    const float* col_given, float* row_measured, float* col_measured, u32* words, i64 rows, i64 cols
) {
    const Tile t(rows, cols, blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
#ifdef LPQ_COL
    constexpr int DOWN = TALL / 32;
    const i64 col_blocks = (rows + 31) / 32;
    __shared__ Skewed<WIDE, DOWN> col_exponents;
    __shared__ Transposed transposed;
    __shared__ Columns columns;
    u32 col_max[WORDS];
    col_amax(w, col_max);
    reduce_lanes<16, 16>(col_max);
    columns.put(t, col_max);
#endif
#ifdef LPQ_ROW
    constexpr int ACROSS = WIDE / 32;
    const i64 row_blocks = (cols + 31) / 32;
    __shared__ alignas(4) u8 row_exponents[TALL][ACROSS];
    {
        u32 amax[LINES];
        float inverse[ROWS];
        row_amax(w, amax);
        reduce_lanes<1, 2>(amax);
        scales<LPQ_ROW>(amax, row_given, row_measured, t.lane_col % 32 == 0, t.high, t.row, t.col / 32, row_blocks,
                        &row_exponents[t.lane_row][t.lane_col / 32], ACROSS, inverse);
        if (row_data) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                u32 pair[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    pair[j] = scale_pair<LPQ_ROW>(value(w[i], 2 * j), inverse[i], value(w[i], 2 * j + 1), inverse[i]);
                store_row(t, row_data, i, pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
            }
        }
    }
#endif
#ifdef LPQ_COL
    __syncthreads();
    {
        float inverse[8];
        columns.merge(t, threadIdx.x / 32 ^ 1, col_max);  // the other 16 rows of a block
        scales<LPQ_COL>(col_max, col_given, col_measured, t.lane_row % 32 == 0, t.wide, t.col, t.row / 32, col_blocks,
                        &col_exponents[t.lane_col][t.lane_row / 32], DOWN, inverse);
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
    }
#endif
    __syncthreads();
#ifdef LPQ_COL
    if (col_data) transposed.store(t, col_data);
#if defined(LPQ_ROW) && defined(LPQ_WHOLE)
    if (words) {
        const int line = threadIdx.x % WIDE, square = threadIdx.x / WIDE % (TALL / WIDE);
        const bool of_cols = threadIdx.x >= TALL;
        const u8* exponents = of_cols ? &col_exponents[line][square * 4] : row_exponents[threadIdx.x];
        store_piece(word_of(t, words, square, line + (of_cols ? WIDE : 0)), *(const u32*)exponents);
        return;
    }
#endif
#endif
#ifdef LPQ_ROW
    const i64 row = (i64)t.down * TALL + threadIdx.x;
    if (row_data && threadIdx.x < TALL && row < rows)
        store_bytes<ACROSS>(
            row_scale + row * row_blocks, (i64)t.across * ACROSS, row_blocks, row_exponents[threadIdx.x]);
#endif
#ifdef LPQ_COL
    const int line = (int)threadIdx.x - (THREADS - WIDE);
    const i64 col = (i64)t.across * WIDE + line;
    if (col_data && line >= 0 && col < cols)
        store_bytes<DOWN>(col_scale + col * col_blocks, (i64)t.down * DOWN, col_blocks, col_exponents[line]);
#endif
}
