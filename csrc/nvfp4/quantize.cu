// NVFP4: both operands of a tile from one read, and the amaxes that must be known before.
//
// LPQ_ROW, LPQ_COL: the operands that are wanted, 1 rounded to the nearest and 2 stochastically. LPQ_SQUARE: blocks of
// 16x16 in place of 1x16. LPQ_ROTATED: the column operand is rotated. LPQ_SHARED: it has the row operand's codes.
#include "e2m1.cuh"
#include "philox.cuh"
#include "tile.cuh"

constexpr u32 MINUS = 0xd7e8;  // the signs of the random Hadamard transform: bit i is set where row i of 16 is negated

// Columns of 16 rows, half of each in this lane and half in the one 8 lanes apart, times signs and H / 4. The result
// is rounded to bf16: element (2 i, 2 i + 1) of column j are the halves of word y[j][i].
__device__ __forceinline__ void rotate(const Tile& t, const u32 (&w)[8][WORDS], u32 (&y)[8][4]) {
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
            const u32 mine[1] = {w[i][k]}, yours[1] = {__shfl_xor_sync(~0u, w[i][k], 8)};
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
extern "C" __global__ void __launch_bounds__(THREADS, LPQ_INPUT == LPQ_FP32 ? 1 : 3) amaxes(
    const void* x, u32* plain, u32* rotated, u32 count, i64 rows, i64 cols
) {
    u32 in_plain = 0, in_rotated = 0;
    for (u32 at = blockIdx.x; at < count; at += gridDim.x) {
        const Tile t(rows, cols, at);
        u32 w[8][WORDS], y[8][4], amax[4];
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

// The factors of 8 lines of blocks of 16, of this operand or transposed. Their scales go to shared memory.
__device__ __forceinline__ void line_factors(
    float (&amax)[8], const Stats& stats, float sixth, const Factors& factors, bool first, int inside, i64 line,
    i64 block, i64 blocks, u8* codes, float (&factor)[8]
) {
    if (stats.given || stats.measured) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            amax[i] = stats.take(amax[i], first, i < inside, (line + i) * blocks + block);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 code = block_scale(amax[i], sixth);
        factor[i] = factors.of[code];
        if (first) codes[i * 8] = (u8)code;
    }
}

// The factor of the 16x16 block that this thread is in a quarter of.
__device__ __forceinline__ void square_factors(
    float amax, const Stats& stats, float sixth, const Factors& factors, bool first, i64 place, bool inside, u8* to,
    float (&factor)[8]
) {
    const u32 code = block_scale(stats.take(amax, first, inside, place), sixth);
    if (first) *to = (u8)code;
#pragma unroll
    for (int i = 0; i < 8; ++i) factor[i] = factors.of[code];
}

// The nibbles of the elements that lie in the matrix, of 8 of which the first `count` do. The others are 0.
__device__ __forceinline__ u32 nibbles(int count) { return count >= 8 ? ~0u : (1u << (4 * count)) - 1; }

// Eight consecutive scale bytes of a line.
__device__ __forceinline__ void store_8_bytes(u8* line, i64 first, i64 count, const u8* bytes) {
    if (count % 8 == 0) {
        if (first < count) {
            store_piece(line + first, *(const uint2*)bytes);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + i < count) line[first + i] = bytes[i];
    }
}

#if LPQ_INPUT == LPQ_FP32
constexpr int BLOCKS = 1;  // to a multiprocessor
#elif LPQ_ROW == 2 || LPQ_COL == 2 || !defined(LPQ_ROW)
constexpr int BLOCKS = 3;
#else
constexpr int BLOCKS = 4;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize(
    const void* x, u8* row_data, u8* row_scale, u32* row_amax_out, u8* col_data, u8* col_scale, u32* col_amax_out,
    const u32* row_amaxes, u32 row_count, const float* row_given, float* row_measured, const u32* col_amaxes,
    u32 col_count, const float* col_given, float* col_measured, const u64* seed, i64 offset, i64 rows, i64 cols
) {
    __shared__ alignas(8) u8 row_codes[TILE][8], col_codes[TILE][8];
    __shared__ alignas(16) u32 transposed[TILE][TILE / 8];
    __shared__ Factors row_factors, col_factors;
    const Tile t(rows, cols, gridDim.x - 1 - blockIdx.x);
    u32 w[8][WORDS];
    load(t, x, w);
    const i64 across = (cols + 15) / 16, down = (rows + 15) / 16;  // blocks of 16 in each direction
    const i64 row_block = t.row / 16, col_block = t.col / 16;
    const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
    float factor[8];
    uint2 bits[8] = {};
#ifdef LPQ_ROW
    {
        const u32 amax = largest_of(row_amaxes, row_count);
        if (writes && row_data) *row_amax_out = amax;
        const float overall = tensor_scale(amax), sixth = __fmul_rn(overall, 1.0f / 6.0f);
        const Stats stats = {row_given, row_measured};
        row_factors.fill(overall);
        __syncthreads();
#ifdef LPQ_SQUARE
        u32 block = thread_amax(w);
        block = max(block, __shfl_xor_sync(~0u, block, 1)), block = max(block, __shfl_xor_sync(~0u, block, 8));
        const bool first = t.lane_row % 16 == 0 && t.lane_col % 16 == 0;
        square_factors(__uint_as_float(block), stats, sixth, row_factors, first, row_block * across + col_block,
                       row_block < down && col_block < across, &row_codes[t.lane_row / 16][t.lane_col / 16], factor);
#ifdef LPQ_SHARED
        if (first) col_codes[t.lane_col / 16][t.lane_row / 16] = row_codes[t.lane_row / 16][t.lane_col / 16];
#endif
#else
        u32 words[WORDS];
        float amaxes[8];
        row_amax(w, words);
        reduce_lanes<1, 1>(words);
#pragma unroll
        for (int i = 0; i < 8; ++i) amaxes[i] = value(words, i);
        line_factors(amaxes, stats, sixth, row_factors, t.lane_col % 16 == 0, col_block < across ? t.high : 0, t.row,
                     col_block, across, &row_codes[t.lane_row][t.lane_col / 16], factor);
#endif
        if (row_data) {
#if LPQ_ROW == 2
            draw((u32)col_block, (u32)(offset + t.row), 0, *seed, t.lane_col & 8, 1, bits);
#endif
            const u32 mask = nibbles(t.wide);
            u8* to = row_data + t.row * across * 8 + t.col / 2;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float v[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(value(w[i], j), factor[i]);
                const u32 codes = encode<LPQ_ROW == 2>(v, bits[i]) & mask;
                if (i < t.high && col_block < across) stream(to + i * across * 8, codes);
#ifdef LPQ_SHARED
                w[i][0] = i < t.high ? codes : 0;
#endif
            }
        }
    }
#endif
#ifdef LPQ_COL
    const int swizzle = t.lane_col / 8 % 8 * 2, chunk = t.lane_row / 8;
#ifdef LPQ_SHARED
    if (writes && col_data) *col_amax_out = *row_amax_out;
    u32 n[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) n[i] = w[i][0];
    transpose_8x8(n);
#pragma unroll
    for (int j = 0; j < 8; ++j) transposed[t.lane_col + j][chunk ^ swizzle] = n[j];
#else
    {
        const u32 amax = largest_of(col_amaxes, col_count);
        if (writes && col_data) *col_amax_out = amax;
        const float overall = tensor_scale(amax), sixth = __fmul_rn(overall, 1.0f / 6.0f);
        const Stats stats = {col_given, col_measured};
        col_factors.fill(overall);
        __syncthreads();
        float amaxes[8];
#ifdef LPQ_ROTATED
        u32 y[8][4], words[4];
        rotate(t, w, y);
        rotated_amax(y, words);
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = larger_pair(words[k], __shfl_xor_sync(~0u, words[k], 8));
#pragma unroll
        for (int j = 0; j < 8; ++j)
            amaxes[j] = __uint_as_float(j & 1 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
#else
        u32 words[WORDS];
        col_amax(w, words);
        reduce_lanes<8, 8>(words);
#pragma unroll
        for (int j = 0; j < 8; ++j) amaxes[j] = value(words, j);
#endif
#ifdef LPQ_SQUARE
        u32 block = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) block = max(block, amax_bits(amaxes[j]));
        block = max(block, __shfl_xor_sync(~0u, block, 1));
        square_factors(__uint_as_float(block), stats, sixth, col_factors, t.lane_row % 16 == 0 && t.lane_col % 16 == 0,
                       col_block * down + row_block, row_block < down && col_block < across,
                       &col_codes[t.lane_col / 16][t.lane_row / 16], factor);
#else
        line_factors(amaxes, stats, sixth, col_factors, t.lane_row % 16 == 0, row_block < down ? t.wide : 0, t.col,
                     row_block, down, &col_codes[t.lane_col][t.lane_row / 16], factor);
#endif
        if (col_data) {
#ifdef LPQ_ROTATED  // what pads the rows was rotated with them
            const u32 mask = ~0u;
#else
            const u32 mask = nibbles(t.high);
#endif
#if LPQ_COL == 2
            draw((u32)((offset + t.row) / 16), (u32)t.col, 1, *seed, t.lane_row & 8, 8, bits);
#endif
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
#ifdef LPQ_ROTATED
                    const float element = __uint_as_float(i & 1 ? y[j][i / 2] & 0xffff0000u : y[j][i / 2] << 16);
#else
                    const float element = value(w[i], j);
#endif
                    v[i] = __fmul_rn(element, factor[j]);
                }
                const u32 codes = encode<LPQ_COL == 2>(v, bits[j]) & mask;
                transposed[t.lane_col + j][chunk ^ swizzle] = codes;
            }
        }
    }
#endif
#endif
    __syncthreads();
#ifdef LPQ_COL
#pragma unroll
    for (int k = 0; k < TILE * TILE / 16 / THREADS; ++k) {
        const int index = threadIdx.x + k * THREADS, line = index / 8, at = index % 8;
        const i64 col = (i64)t.across * TILE + line, block = (i64)t.down * 8 + at;
        if (col_data && col < cols && block < down)
            stream(col_data + (col * down + block) * 8, ((const uint2*)transposed[line])[at ^ (line / 8 % 8)]);
    }
#endif
#ifdef LPQ_SQUARE
    const int lines = TILE / 16;
    const i64 row_lines = down, col_lines = across;
#else
    const int lines = TILE;
    const i64 row_lines = rows, col_lines = cols;
#endif
    const int line = threadIdx.x % TILE;
    if (line < lines) {
        const i64 row = (i64)t.down * lines + line, col = (i64)t.across * lines + line;
#ifdef LPQ_ROW
        if (row_data && threadIdx.x < TILE && row < row_lines)
            store_8_bytes(row_scale + row * across, t.across * (i64)8, across, row_codes[line]);
#endif
#ifdef LPQ_COL
        if (col_data && threadIdx.x >= TILE && col < col_lines)
            store_8_bytes(col_scale + col * down, t.down * (i64)8, down, col_codes[line]);
#endif
    }
}
