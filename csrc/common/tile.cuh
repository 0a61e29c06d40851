// A tile of 128 x 128 elements, held by 256 threads as 8 rows x 8 columns each, and the ways in and out of it.
//
// A warp holds 32 rows x 64 columns: lanes 0-7 are next to each other along the columns, and lanes 8 apart are 8 rows
// apart. So a row of the tile is 128-byte pieces of 16-bit input; a block of 32 along a row is four lanes, and one of
// 32 along a column is the four lanes 8 apart. Whatever lies outside of the matrix is zero.
#pragma once
#include "numbers.cuh"

constexpr int TILE = 128;
constexpr int THREADS = 256;

struct Tile {
    i64 rows, cols;            // of the matrix
    u32 across, down;          // the place of this tile among the tiles
    int lane_row, lane_col;    // this thread's first row and column in the tile
    i64 row, col;              // the same in the matrix
    int high, wide;            // how many of this thread's rows and columns lie in the matrix

    __device__ __forceinline__ Tile(i64 rows, i64 cols, u32 index) : rows(rows), cols(cols) {
        const u32 in_a_row = (u32)((cols + TILE - 1) / TILE);
        down = index / in_a_row, across = index - down * in_a_row;
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        lane_row = (warp & 3) * 32 + (lane >> 3) * 8;
        lane_col = (warp >> 2) * 64 + (lane & 7) * 8;
        row = (i64)down * TILE + lane_row;
        col = (i64)across * TILE + lane_col;
        high = rows - row < 8 ? max((int)(rows - row), 0) : 8;
        wide = cols - col < 8 ? max((int)(cols - col), 0) : 8;
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

// This thread's elements. Unless the rows begin at multiples of 16 bytes they are read one by one.
__device__ __forceinline__ void load(const Tile& t, const void* x, u32 (&w)[8][WORDS]) {
    const Element* from = (const Element*)x + t.row * t.cols + t.col;
    if (t.cols % 8 == 0 && (u64)x % 16 == 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) w[i][j] = 0;
            if (i < t.high && t.wide) {
#pragma unroll
                for (int j = 0; j < WORDS; j += 4)
                    load_16_bytes((const u32*)(from + i * t.cols) + j, w[i][j], w[i][j + 1], w[i][j + 2], w[i][j + 3]);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) w[i][j] = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (i < t.high && j < t.wide)
                    w[i][j / PER_WORD] |= (u32)from[i * t.cols + j] << (16 * (j % PER_WORD));
        }
    }
}

// ------------------------------------------------------------------------------------------ magnitudes

// The largest magnitude in each of this thread's rows, as words of 8 elements.
__device__ __forceinline__ void row_amax(const u32 (&w)[8][WORDS], u32 (&amax)[WORDS]) {
    u32 each[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        each[i] = magnitude(w[i][0]);
#pragma unroll
        for (int j = 1; j < WORDS; ++j) each[i] = larger(each[i], magnitude(w[i][j]));
    }
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        if (PER_WORD == 1)
            amax[k] = each[k];
        else  // the low halves of two rows beside their high halves
            amax[k] = larger(__byte_perm(each[k * 2 % 8], each[(k * 2 + 1) % 8], 0x5410),
                             __byte_perm(each[k * 2 % 8], each[(k * 2 + 1) % 8], 0x7632));
    }
}

// The largest magnitude in each of this thread's columns, as words of 8 elements.
__device__ __forceinline__ void col_amax(const u32 (&w)[8][WORDS], u32 (&amax)[WORDS]) {
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
        amax[j] = magnitude(w[0][j]);
#pragma unroll
        for (int i = 1; i < 8; ++i) amax[j] = larger(amax[j], magnitude(w[i][j]));
    }
}

// The largest of what the lanes hold that differ in the bits of mask from FIRST to LAST.
template <int FIRST, int LAST>
__device__ __forceinline__ void reduce_lanes(u32 (&amax)[WORDS]) {
#pragma unroll
    for (int apart = FIRST; apart <= LAST; apart *= 2)
#pragma unroll
        for (int k = 0; k < WORDS; ++k) amax[k] = larger(amax[k], __shfl_xor_sync(~0u, amax[k], apart));
}

// The largest magnitude of this thread's elements, as fp32 bits.
__device__ __forceinline__ u32 thread_amax(const u32 (&w)[8][WORDS]) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < WORDS; ++j) amax = larger(amax, magnitude(w[i][j]));
    return amax_bits(element_value(larger_half(amax)));
}

// The largest fp32 bits of all threads of the block, in every thread. There may be up to 32 warps.
__device__ __forceinline__ u32 block_max(u32 bits) {
    __shared__ u32 warps[32];
    bits = __reduce_max_sync(~0u, bits);
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x / 32] = bits;
    __syncthreads();
    bits = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0;
    __syncthreads();  // for the next call
    return __reduce_max_sync(~0u, bits);
}

// The largest of some fp32 bits in memory, in every thread of the block.
__device__ __forceinline__ u32 largest_of(const u32* values, u32 count) {
    if (count == 1) return *values;
    u32 bits = 0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) bits = max(bits, values[i]);
    return block_max(bits);
}

// ------------------------------------------------------------------------------------------ bytes out

// Row i of this thread's bytes: 8 columns as two words.
__device__ __forceinline__ void store_row(const Tile& t, u8* out, int i, u32 low, u32 high) {
    if (i >= t.high) return;
    u8* to = out + (t.row + i) * t.cols + t.col;
    if (t.cols % 8 == 0) {
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

// The transposed bytes of a tile, on their way: a row of 128 bytes for each column. The 16-byte pieces of a row are
// permuted so that neither the writing nor the reading lanes meet in a bank.
struct Transposed {
    uint4 piece[TILE][TILE / 16];

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
        const i64 row0 = (i64)t.down * TILE, col0 = (i64)t.across * TILE;
#pragma unroll
        for (int k = 0; k < TILE * TILE / 16 / THREADS; ++k) {
            const int index = threadIdx.x + k * THREADS, col = index / 8, at = index % 8;
            const i64 row = row0 + at * 16;
            if (col0 + col >= t.cols || row >= t.rows) continue;
            const uint4 bytes = piece[col][at ^ (col / 8 % 8)];
            u8* to = out + (col0 + col) * t.rows + row;
            if (t.rows % 16 == 0) {
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

// Four bytes that belong to consecutive places of a row of `count` bytes, from `first` on.
__device__ __forceinline__ void store_4_bytes(u8* row, i64 first, i64 count, u32 bytes) {
    if (count % 4 == 0) {
        if (first < count) store_piece(row + first, bytes);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i < count) row[first + i] = (u8)(bytes >> (8 * i));
    }
}
