// NVFP4: both operands of a tile from one read, and the amaxes that must be known before.
//
// LPQ_ROW, LPQ_COL: the operands that are wanted, 1 rounded to the nearest and 2 stochastically. LPQ_SQUARE: blocks of
// 16x16 in place of 1x16. LPQ_ROTATED: the column operand is rotated. LPQ_SHARED: it has the row operand's codes.
// LPQ_STATS: amaxes of blocks are given or wanted.
//
// A block of threads takes several of `count` tiles one after the other, since to find the factors that it looks up
// takes as long as a tenth of a tile: where the operands have factors of their own that pays.
#include "e2m1.cuh"
#include "philox.cuh"
#include "tile.cuh"

constexpr u32 MINUS = 0xd7e8;  // the signs of the random Hadamard transform: bit i is set where row i of 16 is negated

// Columns of 16 rows, half of each in this lane and half in the one 16 lanes apart, times signs and H / 4. The result
// is rounded to bf16: element (2 i, 2 i + 1) of column j are the halves of word y[j][i].
__device__ __forceinline__ void rotate(const Tile& t, const u32 (&w)[ROWS][WORDS], u32 (&y)[8][4]) {
    const bool upper = t.lane_row & 8;
    float mine_times[8], yours_times[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float low = MINUS >> i & 1 ? -0.25f : 0.25f, high = MINUS >> (i + 8) & 1 ? -0.25f : 0.25f;
        mine_times[i] = upper ? -high : low;
        yours_times[i] = upper ? low : high;
    }
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        float column[PER_WORD][8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 mine[1] = {w[i][k]}, yours[1] = {__shfl_xor_sync(~0u, w[i][k], 16)};
#pragma unroll
            for (int h = 0; h < PER_WORD; ++h)  // a product by a quarter is exact unless it is subnormal in fp32
                column[h][i] = PER_WORD == 2
                    ? fmaf(value(yours, h), yours_times[i], __fmul_rn(value(mine, h), mine_times[i]))
                    : __fadd_rn(__fmul_rn(value(yours, h), yours_times[i]), __fmul_rn(value(mine, h), mine_times[i]));
        }
#pragma unroll
        for (int h = 0; h < PER_WORD; ++h) {
#pragma unroll
            for (int apart = 4; apart >= 1; apart /= 2)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (!(i & apart)) {
                        const float a = column[h][i], b = column[h][i + apart];
                        column[h][i] = __fadd_rn(a, b), column[h][i + apart] = __fsub_rn(a, b);
                    }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                    : "=r"(y[k * PER_WORD + h][i])
                    : "f"(column[h][2 * i + 1]), "f"(column[h][2 * i]));
        }
    }
}

__device__ __forceinline__ u32 bf16_amax_bits(u32 magnitude) { return amax_bits(__uint_as_float(magnitude << 16)); }

// The largest magnitude of each rotated column of this thread, as bf16 bits: columns 2 k, 2 k + 1 in word k.
__device__ __forceinline__ void rotated_amax(const u32 (&y)[8][4], u32 (&amax)[4]) {
    u32 each[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        each[j] = y[j][0] & 0x7fff7fffu;
#pragma unroll
        for (int i = 1; i < 4; ++i) each[j] = larger_pair(each[j], y[j][i] & 0x7fff7fffu);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
        amax[k] = larger_pair(__byte_perm(each[2 * k], each[2 * k + 1], 0x5410),
                              __byte_perm(each[2 * k], each[2 * k + 1], 0x7632));
}

// For each block of threads the largest magnitude in its tiles, of the matrix and of the rotated one.
extern "C" __global__ void __launch_bounds__(THREADS, fitting<LPQ_INPUT == LPQ_FP32 ? 255 : 80>) amaxes(
    const void* x, u32* plain, u32* rotated, u32 count, i64 rows, i64 cols
) {
    u32 in_plain = 0, in_rotated = 0;
    for (u32 at = blockIdx.x; at < count; at += gridDim.x) {
        const Tile t(rows, cols, at);
        u32 w[ROWS][WORDS], y[8][4], amax[4];
        load(t, x, w);
        if (plain) in_plain = max(in_plain, thread_amax(w));
        rotate(t, w, y);
        rotated_amax(y, amax);
#pragma unroll
        for (int k = 1; k < 4; ++k) amax[0] = larger_pair(amax[0], amax[k]);
        in_rotated = max(in_rotated, bf16_amax_bits(max(amax[0] & 0xffffu, amax[0] >> 16)));
    }
    if (plain) {
        in_plain = block_max(in_plain);
        if (threadIdx.x == 0) plain[blockIdx.x] = in_plain;
    }
    in_rotated = block_max(in_rotated);
    if (threadIdx.x == 0) rotated[blockIdx.x] = in_rotated;
}

// Where the amaxes of an operand's blocks are read from, in place of measuring them, and written to; both may be null.
struct Stats {
    const float* given;
    float* measured;

    __device__ __forceinline__ float take(float own, bool first, bool inside, i64 place) const {
        if (measured && first && inside) measured[place] = __uint_as_float(amax_bits(own));
        return !given ? own : inside ? given[place] : 0.0f;
    }
};

// The factors of N lines of blocks of 16, of this operand or transposed, and whether they and the elements are plain.
// Their scales go to shared memory, `apart` bytes from line to line.
template <bool STOCHASTIC, int N>
__device__ __forceinline__ bool line_factors(
    float (&amax)[N], const Stats& stats, float sixth, const Factors& factors, bool first, int inside, i64 line,
    i64 block, i64 blocks, u8* codes, int apart, float (&factor)[N]
) {
    bool plain = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
#ifdef LPQ_STATS
        const u32 code = block_scale(stats.take(amax[i], first, i < inside, (line + i) * blocks + block), sixth);
#else
        const u32 code = block_scale(amax[i], sixth);
#endif
        factor[i] = factors.of[code];
        plain = plain && is_plain<STOCHASTIC>(amax[i], factor[i]);
        if (first) codes[i * apart] = (u8)code;
    }
    return plain;
}

// The factor of the 16x16 block that this thread is in a quarter of.
template <bool STOCHASTIC, int N>
__device__ __forceinline__ bool square_factors(
    float amax, const Stats& stats, float sixth, const Factors& factors, bool first, i64 place, bool inside, u8* to,
    float (&factor)[N]
) {
    const u32 code = block_scale(stats.take(amax, first, inside, place), sixth);
    if (first) *to = (u8)code;
#pragma unroll
    for (int i = 0; i < N; ++i) factor[i] = factors.of[code];
    return is_plain<STOCHASTIC>(amax, factor[0]);
}

// The nibbles of the elements that lie in the matrix, of 8 of which the first `count` do. The others are 0.
__device__ __forceinline__ u32 nibbles(int count) { return WHOLE || count >= 8 ? ~0u : (1u << (4 * count)) - 1; }

constexpr int DRAWN = 2;  // calls of Philox that share their keys

extern "C" __global__ void __launch_bounds__(THREADS, fitting<LPQ_INPUT == LPQ_FP32 ? 255 : REGISTERS>) quantize(
    const void* x, u8* row_data, u8* row_scale, u32* row_amax_out, u8* col_data, u8* col_scale, u32* col_amax_out,
    const u32* row_amaxes, u32 row_count, const float* row_given, float* row_measured, const u32* col_amaxes,
    u32 col_count, const float* col_given, float* col_measured, const u64* seed, i64 offset, u32 count, i64 rows,
    i64 cols
) {
    constexpr int ACROSS = WIDE / 16, DOWN = TALL / 16;  // blocks of 16 in a tile
    Tile t(rows, cols, count - 1 - blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
    const i64 across = (cols + 15) / 16, down = (rows + 15) / 16;
    const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
#ifdef LPQ_ROW
    __shared__ Skewed<TALL, ACROSS> row_codes;
    __shared__ Factors row_factors;
    const u32 row_bits = largest_of(row_amaxes, row_count);
    if (writes && row_data) *row_amax_out = row_bits;
    const float row_overall = tensor_scale(row_bits), row_sixth = __fmul_rn(row_overall, 1.0f / 6.0f);
    row_factors.fill(row_overall);
#endif
#ifdef LPQ_COL
    __shared__ Skewed<WIDE, DOWN> col_codes;
    __shared__ alignas(16) u32 transposed[WIDE][TALL / 8];
#ifdef LPQ_SHARED
    if (writes && col_data) *col_amax_out = *row_amax_out;
#else
    __shared__ Factors col_factors;
    const u32 col_bits = largest_of(col_amaxes, col_count);
    if (writes && col_data) *col_amax_out = col_bits;
    const float col_overall = tensor_scale(col_bits), col_sixth = __fmul_rn(col_overall, 1.0f / 6.0f);
    col_factors.fill(col_overall);
#endif
#endif
    for (u32 index = blockIdx.x;;) {
        const i64 row_block = t.row / 16, col_block = t.col / 16;
        __syncthreads();
#ifdef LPQ_ROW
        {
            const Stats stats = {row_given, row_measured};
            float factor[ROWS];
#ifdef LPQ_SQUARE
            u32 block = thread_amax(w);
            block = max(block, __shfl_xor_sync(~0u, block, 1)), block = max(block, __shfl_xor_sync(~0u, block, 16));
            const bool first = t.lane_row % 16 == 0 && t.lane_col % 16 == 0;
            const bool plain = square_factors<LPQ_ROW == 2>(
                __uint_as_float(block), stats, row_sixth, row_factors, first, row_block * across + col_block,
                row_block < down && col_block < across, &row_codes[t.lane_row / 16][t.lane_col / 16], factor);
#ifdef LPQ_SHARED
            if (first) col_codes[t.lane_col / 16][t.lane_row / 16] = row_codes[t.lane_row / 16][t.lane_col / 16];
#endif
#else
            u32 words[LINES];
            float amaxes[ROWS];
            row_amax(w, words);
            reduce_lanes<1, 1>(words);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) amaxes[i] = value(words, i);
            const bool plain = line_factors<LPQ_ROW == 2>(
                amaxes, stats, row_sixth, row_factors, t.lane_col % 16 == 0, col_block < across ? t.high : 0, t.row,
                col_block, across, &row_codes[t.lane_row][t.lane_col / 16], ACROSS, factor);
#endif
            if (row_data) {
                const u32 mask = nibbles(t.wide);
                u8* to = row_data + t.row * across * 8 + t.col / 2;
#pragma unroll
                for (int k = 0; k < 4; k += DRAWN) {
                    uint2 bits[2][DRAWN] = {};
#if LPQ_ROW == 2
                    draw((u32)col_block, (u32)(offset + t.row) + k, 4, 0, *seed, t.lane_col & 8, 1, bits);
#endif
#pragma unroll
                    for (int n = 0; n < 2 * DRAWN; ++n) {
                        const int i = k + n % DRAWN + n / DRAWN * 4;
                        float v[8];
#pragma unroll
                        for (int j = 0; j < 8; ++j) v[j] = value(w[i], j);
                        const u32 codes = encode<LPQ_ROW == 2>(v, factor[i], plain, bits[n / DRAWN][n % DRAWN]) & mask;
                        if (i < t.high && col_block < across) stream(to + i * across * 8, codes);
#ifdef LPQ_SHARED
                        w[i][0] = i < t.high ? codes : 0;
#endif
                    }
                }
            }
        }
#endif
#ifdef LPQ_COL
        const int swizzle = t.lane_col / 8 % DOWN * 2, chunk = t.lane_row / 8;
#ifdef LPQ_SHARED
        u32 n[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) n[i] = w[i][0];
        transpose_8x8(n);
#pragma unroll
        for (int j = 0; j < 8; ++j) transposed[t.lane_col + j][chunk ^ swizzle] = n[j];
#else
        {
            const Stats stats = {col_given, col_measured};
            float factor[8], amaxes[8];
#ifdef LPQ_ROTATED
            u32 y[8][4], words[4];
            rotate(t, w, y);
            rotated_amax(y, words);
#pragma unroll
            for (int k = 0; k < 4; ++k) words[k] = larger_pair(words[k], __shfl_xor_sync(~0u, words[k], 16));
#pragma unroll
            for (int j = 0; j < 8; ++j)
                amaxes[j] = __uint_as_float(j & 1 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
#else
            u32 words[WORDS];
            col_amax(w, words);
            reduce_lanes<16, 16>(words);
#pragma unroll
            for (int j = 0; j < 8; ++j) amaxes[j] = value(words, j);
#endif
#ifdef LPQ_SQUARE
            u32 block = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) block = max(block, amax_bits(amaxes[j]));
            block = max(block, __shfl_xor_sync(~0u, block, 1));
            const bool plain = square_factors<LPQ_COL == 2>(
                __uint_as_float(block), stats, col_sixth, col_factors, t.lane_row % 16 == 0 && t.lane_col % 16 == 0,
                col_block * down + row_block, row_block < down && col_block < across,
                &col_codes[t.lane_col / 16][t.lane_row / 16], factor);
#else
            const bool plain = line_factors<LPQ_COL == 2>(
                amaxes, stats, col_sixth, col_factors, t.lane_row % 16 == 0, row_block < down ? t.wide : 0, t.col,
                row_block, down, &col_codes[t.lane_col][t.lane_row / 16], DOWN, factor);
#endif
            if (col_data) {
#ifdef LPQ_ROTATED  // what pads the rows was rotated with them
                const u32 mask = ~0u;
#else
                const u32 mask = nibbles(t.high);
#endif
#pragma unroll
                for (int k = 0; k < 4; k += DRAWN) {
                    uint2 bits[2][DRAWN] = {};
#if LPQ_COL == 2
                    draw((u32)((offset + t.row) / 16), (u32)t.col + k, 4, 1, *seed, t.lane_row & 8, 16, bits);
#endif
#pragma unroll
                    for (int n = 0; n < 2 * DRAWN; ++n) {
                        const int j = k + n % DRAWN + n / DRAWN * 4;
                        float v[8];
#pragma unroll
                        for (int i = 0; i < 8; ++i)
#ifdef LPQ_ROTATED
                            v[i] = __uint_as_float(i & 1 ? y[j][i / 2] & 0xffff0000u : y[j][i / 2] << 16);
#else
                            v[i] = value(w[i], j);
#endif
                        transposed[t.lane_col + j][chunk ^ swizzle] =
                            encode<LPQ_COL == 2>(v, factor[j], plain, bits[n / DRAWN][n % DRAWN]) & mask;
                    }
                }
            }
        }
#endif
#endif
        __syncthreads();
#ifdef LPQ_SQUARE
        constexpr int ROW_LINES = DOWN, COL_LINES = ACROSS;
        const i64 row_lines = down, col_lines = across;
#else
        constexpr int ROW_LINES = TALL, COL_LINES = WIDE;
        const i64 row_lines = rows, col_lines = cols;
#endif
#ifdef LPQ_ROW
        const i64 row = (i64)t.down * ROW_LINES + threadIdx.x;
        if (row_data && threadIdx.x < ROW_LINES && row < row_lines)
            store_bytes<ACROSS>(row_scale + row * across, (i64)t.across * ACROSS, across, row_codes[threadIdx.x]);
#endif
#ifdef LPQ_COL
        const int scale_line = (int)threadIdx.x - (THREADS - COL_LINES);
        const i64 scale_col = (i64)t.across * COL_LINES + scale_line;
        if (col_data && scale_line >= 0 && scale_col < col_lines)
            store_bytes<DOWN>(col_scale + scale_col * down, (i64)t.down * DOWN, down, col_codes[scale_line]);
        constexpr int STEP = THREADS / DOWN;
        const int first = threadIdx.x / DOWN, at = threadIdx.x % DOWN;
        const i64 col = (i64)t.across * WIDE + first, block = (i64)t.down * DOWN + at;
        u8* to = col_data + (col * down + block) * 8;
#pragma unroll
        for (int k = 0; k < WIDE / STEP; ++k, to += STEP * 8 * down)
            if (col_data && (WHOLE || (col + k * STEP < cols && block < down)))
                stream(to, ((const uint2*)transposed[first + k * STEP])[at ^ ((first + k * STEP) / 8 % DOWN)]);
#endif
        index += gridDim.x;
        if (index >= count) break;
        t = Tile(rows, cols, count - 1 - index);
        load(t, x, w);
    }
}
