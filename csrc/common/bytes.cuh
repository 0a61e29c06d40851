// A tile's elements as 8-bit floats, and bytes on their way out.
#pragma once
#include "tile.cuh"

// Eight elements, some of them infinite, times a factor, in E5M2: two words. To keep an infinity takes several instructions,
// and registers that all other elements would miss: so this is not inlined.
__device__ __noinline__ uint2 scale_infinite(float4 first, float4 last, float factor) {
    const u32 a = scale_pair<E5M2>(first.x, factor, first.y, factor), b = scale_pair<E5M2>(first.z, factor, first.w, factor);
    const u32 c = scale_pair<E5M2>(last.x, factor, last.y, factor), d = scale_pair<E5M2>(last.z, factor, last.w, factor);
    return make_uint2(a | b << 16, c | d << 16);
}

// The elements of a row of this thread, times a factor, as 8-bit floats: two words. FINITE: none is infinite, which saves an
// instruction in ten. Where that is not known E4M3 makes NaN of those on the way, and E5M2 looks whether there are any.
template <class F, bool FINITE = false>
__device__ __forceinline__ void scale_row(const u32 (&row)[WORDS], float factor, u32& low, u32& high) {
    if (!FINITE && F::infinities) {
        if (are_finite(row)) return scale_row<F, true>(row, factor, low, high);
        const uint2 codes = scale_infinite(make_float4(value(row, 0), value(row, 1), value(row, 2), value(row, 3)),
                                           make_float4(value(row, 4), value(row, 5), value(row, 6), value(row, 7)), factor);
        low = codes.x, high = codes.y;
        return;
    }
    u32 w[WORDS], pair[4];
#pragma unroll
    for (int j = 0; j < WORDS; ++j) w[j] = row[j];
    if (!FINITE) keep_apart(w);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        pair[j] = scale_pair<F, FINITE>(value(w, 2 * j), factor, value(w, 2 * j + 1), factor);
    low = pair[0] | pair[1] << 16, high = pair[2] | pair[3] << 16;
}

// The words of column j, likewise.
template <class F, bool FINITE = false>
__device__ __forceinline__ void scale_col(const u32 (&w)[ROWS][WORDS], int j, float factor, u32& low, u32& high) {
    if (!FINITE && F::infinities) {
        u32 words[ROWS];
        float v[8];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const u32 a[1] = {words[i] = w[i][j / PER_WORD]};
            v[i] = value(a, j % PER_WORD);
        }
        if (are_finite(words)) return scale_col<F, true>(w, j, factor, low, high);
        const uint2 codes = scale_infinite(make_float4(v[0], v[1], v[2], v[3]), make_float4(v[4], v[5], v[6], v[7]), factor);
        low = codes.x, high = codes.y;
        return;
    }
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 a[1] = {w[2 * i][j / PER_WORD]}, b[1] = {w[2 * i + 1][j / PER_WORD]};
        if (!FINITE) keep_apart(a), keep_apart(b);
        pair[i] = scale_pair<F, FINITE>(value(a, j % PER_WORD), factor, value(b, j % PER_WORD), factor);
    }
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

// N bytes of shared memory that belong to consecutive places of a row of `count` bytes, from `first` on.
template <int N>
__device__ __forceinline__ void store_bytes(void* row, i64 first, i64 count, const void* bytes) {
    u8* to = (u8*)row + first;
    const bool pieces = IN_SECTIONS ? first + N <= count && (u64)to % N == 0 : count % N == 0;
    if (WHOLE || pieces) {
        if (!WHOLE && first >= count) return;
        const u32* words = (const u32*)bytes;  // which may begin at any multiple of 4
        if (N == 8) store_piece(to, make_uint2(words[0], words[1]));
        if (N == 16) store_piece(to, make_uint4(words[0], words[1], words[2], words[3]));
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (first + i < count) to[i] = ((const u8*)bytes)[i];
    }
}

// A byte for each of LINES_ lines and each of BLOCKS blocks along them, on their way to a matrix that lies column by
// column: the bytes of one block of all lines are next to each other. With LPQ_ROW_MAJOR it lies row by row.
template <int BLOCKS, int LINES_>
struct ByColumns {
    static constexpr int PIECES = LINES_ / 16, TAKEN = ROW_MAJOR ? LINES_ : BLOCKS * PIECES;  // threads that store
    alignas(16) u8 bytes[BLOCKS][LINES_ + 16];  // lanes that hold blocks side by side do not meet in a bank

    // Put the bytes of eight lines.
    __device__ __forceinline__ void put(int block, int line, u32 low, u32 high) {
        *(uint2*)&bytes[block][line] = make_uint2(low, high);
    }

    // After __syncthreads, by threads that count from 0: to the column of each block, of `lines` bytes.
    // Lines end before `end`, and blocks before `blocks`.
    __device__ __forceinline__ void store(
        int thread, u8* out, i64 first_line, i64 end, i64 lines, i64 first_block, i64 blocks
    ) const {
        if (ROW_MAJOR) return store_line(thread, out, first_line, end, first_block, blocks);
        const int block = thread / PIECES, at = thread % PIECES * 16;
        if (thread >= 0 && block < BLOCKS && (WHOLE || first_block + block < blocks))
            store_bytes<16>(out + (first_block + block) * lines, first_line + at, end, &bytes[block][at]);
    }

    // To the row of a line.
    __device__ __forceinline__ void store_line(
        int thread, u8* out, i64 first_line, i64 end, i64 first_block, i64 blocks
    ) const {
        const i64 line = first_line + thread;
        if (thread < 0 || thread >= LINES_ || line >= end) return;
        u8* to = out + line * blocks + first_block;
#pragma unroll
        for (int k = 0; k < BLOCKS; k += 4) {
            u32 word = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) word |= (u32)bytes[k + j][thread] << (8 * j);
            if (first_block + k + 4 <= blocks && (u64)(to + k) % 4 == 0) {
                store_piece(to + k, word);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (first_block + k + j < blocks) to[k + j] = (u8)(word >> (8 * j));
            }
        }
    }
};
