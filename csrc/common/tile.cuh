// A tile of LPQ_TALL x 128 elements, held by threads of 8 x 8 each, and the ways in and out of it.
//
// 16 lanes next to each other hold a line of the tile, so that a warp reads and writes pieces of whole lines: a block
// of 16 or 32 along a row is 2 or 4 lanes, one of 16 along a column the two lanes 16 apart. Tiles are tall where a
// column operand is written, whose lines then go out in large pieces. Whatever lies outside of the matrix is zero;
// LPQ_WHOLE says that nothing does, and that lines begin at multiples of 16 bytes, which saves many instructions.
#pragma once
#include "numbers.cuh"

#ifndef LPQ_TALL
#define LPQ_TALL 128
#endif
#ifdef LPQ_WHOLE
constexpr bool WHOLE = true;
#else
constexpr bool WHOLE = false;
#endif
constexpr int TALL = LPQ_TALL;
constexpr int WIDE = 128;
constexpr int ROWS = 8;
constexpr int THREADS = TALL * 2;
constexpr int WARPS = THREADS / 32;
constexpr int WARP_ROWS = 16;
constexpr int LINES = ROWS / PER_WORD;  // words with an element for each of a thread's rows
// Blocks of threads to a multiprocessor, where a thread needs this many registers.
template <int REGISTERS>
constexpr int fitting = 65536 / (REGISTERS * THREADS);
#ifdef LPQ_ROUNDED  // the matrix is in fp32, and rounded to LPQ_INPUT as it is read
typedef float Source;
constexpr int REGISTERS = 96;
#else
typedef Element Source;
constexpr int REGISTERS = LPQ_INPUT == LPQ_FP32 ? 128 : 64;
#endif

struct Tile {
    i64 rows, cols;            // of the matrix
    u32 across, down;          // the place of this tile among the tiles
    int lane_row, lane_col;    // this thread's first row and column in the tile
    i64 row, col;              // the same in the matrix
    int high, wide;            // how many of this thread's rows and columns lie in the matrix

    __device__ __forceinline__ Tile(i64 rows, i64 cols, u32 index) : rows(rows), cols(cols) {
#if defined(LPQ_COL) && !defined(LPQ_ROW)  // tiles follow each other along what is written
        const u32 in_a_col = (u32)((rows + TALL - 1) / TALL);
        across = index / in_a_col, down = index - across * in_a_col;
#else
        const u32 in_a_row = (u32)((cols + WIDE - 1) / WIDE);
        down = index / in_a_row, across = index - down * in_a_row;
#endif
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        lane_row = warp * WARP_ROWS + (lane >> 4) * ROWS;
        lane_col = (lane & 15) * 8;
        row = (i64)down * TALL + lane_row;
        col = (i64)across * WIDE + lane_col;
        high = !WHOLE && rows - row < ROWS ? max((int)(rows - row), 0) : ROWS;
        wide = !WHOLE && cols - col < 8 ? max((int)(cols - col), 0) : 8;
    }
};

__device__ __forceinline__ void load_16_bytes(const void* from, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(from));
}

// Results are not read again here, and go out of the cache before what is: without that a cast is 6 % slower.
__device__ __forceinline__ void stream(void* to, uint4 v) { __stcs((uint4*)to, v); }
__device__ __forceinline__ void stream(void* to, uint2 v) { __stcs((uint2*)to, v); }
__device__ __forceinline__ void stream(void* to, u32 v) { __stcs((u32*)to, v); }

// A piece of a 32-byte sector that other blocks complete stays in the cache: alone in memory it would cost a read.
__device__ __forceinline__ void store_piece(void* to, u32 v) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " st.global.L2::cache_hint.u32 [%0], %1, policy; }" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_piece(void* to, uint2 v) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, policy; }" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_piece(void* to, uint4 v) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, policy; }"
        ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The words of the elements in 16 bytes.
constexpr int LOADED = 16 / sizeof(Source) / PER_WORD;

__device__ __forceinline__ void load_words(const Source* from, u32 (&words)[LOADED]) {
    u32 bits[4];
    load_16_bytes(from, bits[0], bits[1], bits[2], bits[3]);
#pragma unroll
    for (int k = 0; k < LOADED; ++k)
#ifdef LPQ_ROUNDED
        words[k] = rounded(__uint_as_float(bits[2 * k]), __uint_as_float(bits[2 * k + 1]));
#else
        words[k] = bits[k];
#endif
}

__device__ __forceinline__ u32 load_element(const Source* from) {
#ifdef LPQ_ROUNDED
    return rounded(*from, 0.0f);
#else
    return *from;
#endif
}

// This thread's elements. Unless the rows begin at multiples of 16 bytes they are read one by one.
__device__ __forceinline__ void load(const Tile& t, const void* x, u32 (&w)[ROWS][WORDS]) {
    const Source* from = (const Source*)x + t.row * t.cols + t.col;
    if (WHOLE || (t.cols % 8 == 0 && (u64)x % 16 == 0)) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) w[i][j] = 0;
            if (i < t.high && t.wide) {
#pragma unroll
                for (int j = 0; j < WORDS; j += LOADED) {
                    u32 words[LOADED];
                    load_words(from + i * t.cols + j * PER_WORD, words);
#pragma unroll
                    for (int k = 0; k < LOADED; ++k) w[i][j + k] = words[k];
                }
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) w[i][j] = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (i < t.high && j < t.wide)
                    w[i][j / PER_WORD] |= load_element(from + i * t.cols + j) << (16 * (j % PER_WORD));
        }
    }
}

// ------------------------------------------------------------------------------------------ magnitudes

// The largest magnitude in each of this thread's rows, as words of their elements.
__device__ __forceinline__ void row_amax(const u32 (&w)[ROWS][WORDS], u32 (&amax)[LINES]) {
    u32 each[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        each[i] = magnitude(w[i][0]);
#pragma unroll
        for (int j = 1; j < WORDS; ++j) each[i] = larger(each[i], magnitude(w[i][j]));
    }
#pragma unroll
    for (int k = 0; k < LINES; ++k) {
        if (PER_WORD == 1)
            amax[k] = each[k];
        else  // the low halves of two rows beside their high halves
            amax[k] = larger(__byte_perm(each[k * 2 % ROWS], each[(k * 2 + 1) % ROWS], 0x5410),
                             __byte_perm(each[k * 2 % ROWS], each[(k * 2 + 1) % ROWS], 0x7632));
    }
}

// The largest magnitude in each of this thread's columns, as words of 8 elements.
__device__ __forceinline__ void col_amax(const u32 (&w)[ROWS][WORDS], u32 (&amax)[WORDS]) {
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
        amax[j] = magnitude(w[0][j]);
#pragma unroll
        for (int i = 1; i < ROWS; ++i) amax[j] = larger(amax[j], magnitude(w[i][j]));
    }
}

// The largest of what the lanes hold that differ in the bits of mask from FIRST to LAST.
template <int FIRST, int LAST, int N>
__device__ __forceinline__ void reduce_lanes(u32 (&amax)[N]) {
#pragma unroll
    for (int apart = FIRST; apart <= LAST; apart *= 2)
#pragma unroll
        for (int k = 0; k < N; ++k) amax[k] = larger(amax[k], __shfl_xor_sync(~0u, amax[k], apart));
}

// The largest magnitude in each column of the rows of each warp: what a taller block takes its amax from.
struct Columns {
    alignas(16) Element of[WARPS][WIDE];

    // To be called with the words of col_amax, reduced over the warp; all threads wait for each other then.
    __device__ __forceinline__ void put(const Tile& t, const u32 (&amax)[WORDS]) {
        if ((threadIdx.x & 16) == 0)
#pragma unroll
            for (int k = 0; k < WORDS; k += 4)
                ((uint4*)&of[threadIdx.x >> 5][t.lane_col])[k / 4] =
                    make_uint4(amax[k], amax[k + 1], amax[k + 2], amax[k + 3]);
    }
    // The larger of what this warp and another have in this thread's columns.
    __device__ __forceinline__ void merge(const Tile& t, int warp, u32 (&amax)[WORDS]) const {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
            const uint4 other = ((const uint4*)&of[warp][t.lane_col])[k / 4];
            amax[k] = larger(amax[k], other.x), amax[k + 1] = larger(amax[k + 1], other.y);
            amax[k + 2] = larger(amax[k + 2], other.z), amax[k + 3] = larger(amax[k + 3], other.w);
        }
    }
    // The largest of some warps' in one column, as fp32 bits.
    __device__ __forceinline__ u32 largest(int col, int first, int count) const {
        u32 bits = 0;
        for (int k = 0; k < count; ++k) bits = max(bits, (u32)of[first + k][col]);
        return amax_bits(element_value(bits));
    }
};

// The largest magnitude of this thread's elements, as fp32 bits.
__device__ __forceinline__ u32 thread_amax(const u32 (&w)[ROWS][WORDS]) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < WORDS; ++j) amax = larger(amax, magnitude(w[i][j]));
    return amax_bits(element_value(larger_half(amax)));
}

// The largest fp32 bits of all threads of a group of warps, up to 32 of which follow each other, in every thread.
__device__ __forceinline__ u32 group_max(u32 bits, int group) {
    __shared__ u32 warps[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bits = __reduce_max_sync(~0u, bits);
    if (lane == 0) warps[warp] = bits;
    __syncthreads();
    bits = lane < group ? warps[warp / group * group + lane] : 0;
    __syncthreads();  // for the next call
    return __reduce_max_sync(~0u, bits);
}

__device__ __forceinline__ u32 block_max(u32 bits) { return group_max(bits, blockDim.x / 32); }

// The largest of some fp32 bits in memory, in every thread of the block.
__device__ __forceinline__ u32 largest_of(const u32* values, u32 count) {
    if (count == 1) return *values;
    u32 bits = 0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) bits = max(bits, values[i]);
    return block_max(bits);
}

// ------------------------------------------------------------------------------------------ bytes out

// The elements of a row of this thread, times a factor, as 8-bit floats: two words.
template <class F>
__device__ __forceinline__ void scale_row(const u32 (&w)[WORDS], float factor, u32& low, u32& high) {
    u32 pair[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pair[j] = scale_pair<F>(value(w, 2 * j), factor, value(w, 2 * j + 1), factor);
    low = pair[0] | pair[1] << 16, high = pair[2] | pair[3] << 16;
}

// Those of column j, likewise.
template <class F>
__device__ __forceinline__ void scale_col(const u32 (&w)[ROWS][WORDS], int j, float factor, u32& low, u32& high) {
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = scale_pair<F>(value(w[2 * i], j), factor, value(w[2 * i + 1], j), factor);
    low = pair[0] | pair[1] << 16, high = pair[2] | pair[3] << 16;
}

// Row i of this thread's bytes: 8 columns as two words.
__device__ __forceinline__ void store_row(const Tile& t, u8* out, int i, u32 low, u32 high) {
    if (i >= t.high) return;
    u8* to = out + (t.row + i) * t.cols + t.col;
    if (WHOLE || t.cols % 8 == 0) {
        if (t.wide) stream(to, make_uint2(low, high));
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (j < t.wide) to[j] = (u8)((j < 4 ? low : high) >> (8 * (j % 4)));
    }
}

// Bytes of a 4 x 4 square, one word for each row, as one word for each column.
__device__ __forceinline__ void transpose_4x4(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab0 = __byte_perm(a, b, 0x5140), ab1 = __byte_perm(a, b, 0x7362);
    const u32 cd0 = __byte_perm(c, d, 0x5140), cd1 = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab0, cd0, 0x5410), b = __byte_perm(ab0, cd0, 0x7632);
    c = __byte_perm(ab1, cd1, 0x5410), d = __byte_perm(ab1, cd1, 0x7632);
}

// Nibbles of an 8 x 8 square, likewise; the first one is the lowest.
__device__ __forceinline__ void transpose_8x8(u32 (&n)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // bytes of two rows: first the even columns, then the odd ones
        const u32 a = n[i], b = n[i + 1];
        n[i] = (a & 0x0f0f0f0fu) | (b & 0x0f0f0f0fu) << 4;
        n[i + 1] = (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
    }
    transpose_4x4(n[0], n[2], n[4], n[6]), transpose_4x4(n[1], n[3], n[5], n[7]);
}

// The transposed bytes of a tile, on their way: a row of TALL bytes for each column. The 16-byte pieces of a row are
// permuted so that neither the writing nor the reading lanes meet in a bank.
struct Transposed {
    uint4 piece[WIDE][TALL / 16];

    // Column j of this thread's bytes: 8 rows as two words.
    __device__ __forceinline__ void put(const Tile& t, int j, u32 low, u32 high) {
        const int col = t.lane_col + j, chunk = t.lane_row / 8;
        uint2* pieces = (uint2*)piece[col];
        pieces[chunk ^ (col / 8 % 8 * 2)] = make_uint2(low, high);
    }

    // All of this thread's bytes: 8 rows as two words each.
    __device__ __forceinline__ void put_rows(const Tile& t, u32 (&low)[8], u32 (&high)[8]) {
        transpose_4x4(low[0], low[1], low[2], low[3]), transpose_4x4(low[4], low[5], low[6], low[7]);
        transpose_4x4(high[0], high[1], high[2], high[3]), transpose_4x4(high[4], high[5], high[6], high[7]);
#pragma unroll
        for (int j = 0; j < 4; ++j) put(t, j, low[j], low[j + 4]), put(t, j + 4, high[j], high[j + 4]);
    }

    // After __syncthreads: out is [cols, rows].
    __device__ __forceinline__ void store(const Tile& t, u8* out) const {
        constexpr int STEP = THREADS / (TALL / 16);
        const int first = threadIdx.x / (TALL / 16), at = threadIdx.x % (TALL / 16);
        const i64 row = (i64)t.down * TALL + at * 16, col = (i64)t.across * WIDE + first;
        u8* to = out + col * t.rows + row;
#pragma unroll
        for (int k = 0; k < WIDE / STEP; ++k, to += STEP * t.rows) {
            const int line = first + k * STEP;
            if (!WHOLE && (col + k * STEP >= t.cols || row >= t.rows)) continue;
            const uint4 bytes = piece[line][at ^ (line / 8 % 8)];
            if (WHOLE || t.rows % 16 == 0) {
                stream(to, bytes);
            } else {
                const u32 word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    if (row + i < t.rows) to[i] = (u8)(word[i / 4] >> (8 * (i % 4)));
            }
        }
    }
};

// Rows of N bytes for LINES_ lines, of which lanes write every eighth: a word is left out for that after eight of them.
template <int LINES_, int N>
struct Skewed {
    alignas(4) u8 bytes[LINES_ * N + LINES_ / 2];

    __device__ __forceinline__ u8* operator[](int line) { return bytes + line * N + line / 8 * 4; }
};

// N bytes of shared memory that belong to consecutive places of a row of `count` bytes, from `first` on.
template <int N>
__device__ __forceinline__ void store_bytes(void* row, i64 first, i64 count, const void* bytes) {
    u8* to = (u8*)row + first;
    if (WHOLE || count % N == 0) {
        if (!WHOLE && first >= count) return;
        if (N == 4) store_piece(to, *(const u32*)bytes);
        const u32* words = (const u32*)bytes;  // which may begin at any multiple of 4
        if (N == 8) store_piece(to, make_uint2(words[0], words[1]));
        if (N == 16) store_piece(to, make_uint4(words[0], words[1], words[2], words[3]));
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (first + i < count) to[i] = ((const u8*)bytes)[i];
    }
}

// Where untile.cu takes a word of a line of a 128 x 128 from: 128 of rows, then 128 of columns, for each of them.
__device__ __forceinline__ u32* word_of(const Tile& t, u32* words, int square, int line) {
    const i64 tile = ((i64)t.down * (TALL / WIDE) + square) * (u32)((t.cols + WIDE - 1) / WIDE) + t.across;
    return words + tile * (2 * WIDE) + line;
}
