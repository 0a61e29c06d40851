// Transposes: of small squares in registers, and of a tile on its way to memory.
#pragma once
#include "bytes.cuh"

// Bytes of a 4 x 4 square, one word for each row, as one word for each column.
__device__ __forceinline__ void transpose_4x4(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab0 = __byte_perm(a, b, 0x5140), ab1 = __byte_perm(a, b, 0x7362);
    const u32 cd0 = __byte_perm(c, d, 0x5140), cd1 = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab0, cd0, 0x5410), b = __byte_perm(ab0, cd0, 0x7632);
    c = __byte_perm(ab1, cd1, 0x5410), d = __byte_perm(ab1, cd1, 0x7632);
}

// The transposed bytes of a tile, on their way: a row of TALL bytes for each column. The 8-byte pieces of 128 bytes are permuted
// so that neither the writing nor the reading lanes meet in a bank: pieces of columns 8 apart lie at different places.
struct Transposed {
    uint4 piece[WIDE][TALL / 16];

    // Column j of this thread's bytes: 8 rows as two words.
    __device__ __forceinline__ void put(const Tile& t, int j, u32 low, u32 high) {
        const int across = t.lane_col / 8, place = (t.lane_col + j) * (TALL / 8) + t.lane_row / 8;
        ((uint2*)piece)[place ^ (across % 8 * 2 + across / 8 % 2)] = make_uint2(low, high);
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
        const i64 row = t.top() + (i64)t.down * TALL + at * 16, col = (i64)t.across * WIDE + first;
        u8* to = out + (t.lines() + col) * t.line() + row;
#pragma unroll
        for (int k = 0; k < WIDE / STEP; ++k, to += STEP * t.line()) {
            const int line = first + k * STEP;
            if (!WHOLE && (col + k * STEP >= t.cols || row >= t.bottom())) continue;
            uint4 bytes = ((const uint4*)piece)[(line * (TALL / 16) + at) ^ line / 8 % 8];
            if (k * STEP / 64 % 2) bytes = make_uint4(bytes.z, bytes.w, bytes.x, bytes.y);  // as line / 64 % 2 is
            if (WHOLE || t.line() % 16 == 0) {
                stream(to, bytes);
            } else {
                const u32 word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    if (row + i < t.bottom()) to[i] = (u8)(word[i / 4] >> (8 * (i % 4)));
            }
        }
    }
};

// The transposed values of a tile, of 16 bits each, on their way: a row of TALL for each column, in pieces of eight that are
// permuted likewise. The sizes of the matrix are multiples of 8.
struct TransposedValues {
    uint4 piece[WIDE][TALL / 8];

    // Eight values of this thread's column j.
    __device__ __forceinline__ void put(const Tile& t, int j, uint4 values) {
        piece[t.lane_col + j][t.lane_row / 8 ^ t.lane_col / 8 % 8] = values;
    }

    // After __syncthreads: out is [cols, rows].
    __device__ __forceinline__ void store(const Tile& t, void* out) const {
        constexpr int STEP = THREADS / (TALL / 8);
        const int first = threadIdx.x / (TALL / 8), at = threadIdx.x % (TALL / 8);
        const i64 row = t.top() + (i64)t.down * TALL + at * 8, col = (i64)t.across * WIDE + first;
        u16* to = (u16*)out + (t.lines() + col) * t.line() + row;
#pragma unroll
        for (int k = 0; k < WIDE / STEP; ++k, to += STEP * t.line()) {
            const int line = first + k * STEP;
            if (WHOLE || (col + k * STEP < t.cols && row < t.bottom())) stream(to, piece[line][at ^ line / 8 % 8]);
        }
    }
};

// The transposed codes of a tile, of 4 bits each, on their way: a row of TALL for each column, in pieces of sixteen that are
// permuted likewise.
struct TransposedNibbles {
    static constexpr int GROUPS = TALL / 16;
    alignas(16) u32 transposed[WIDE][TALL / 8];

    // Eight codes of this thread's column j.
    __device__ __forceinline__ void put(const Tile& t, int j, u32 codes) {
        transposed[t.lane_col + j][t.lane_row / 8 ^ t.lane_col / 8 % GROUPS * 2] = codes;
    }

    // After __syncthreads: out has a line of `line` groups of 16 for each column, of which a section has `count`.
    __device__ __forceinline__ void store(const Tile& t, u8* out, i64 line, i64 count) const {
        out += (t.lines() * line + t.top() / 16) * 8;
        constexpr int STEP = THREADS / GROUPS;
        const int first = threadIdx.x / GROUPS, at = threadIdx.x % GROUPS;
        const i64 col = (i64)t.across * WIDE + first, group = (i64)t.down * GROUPS + at;
        u8* to = out + (col * line + group) * 8;
#pragma unroll
        for (int k = 0; k < WIDE / STEP; ++k, to += STEP * 8 * line)
            if (WHOLE || (col + k * STEP < t.cols && group < count))
                stream(to, ((const uint2*)transposed[first + k * STEP])[at ^ ((first + k * STEP) / 8 % GROUPS)]);
    }
};

// A column operand on its way: codes, or their values.
template <bool DECODED>
struct OnItsWay : Transposed {};
template <>
struct OnItsWay<true> : TransposedValues {};
