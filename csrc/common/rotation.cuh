// The random Hadamard transform of 16 (lpq.formats.rotation.HADAMARD) of columns of a tile, rounded to bf16, and back.
#pragma once
#include "tile.cuh"

constexpr u32 MINUS = 0xd7e8;  // bit i is set where row i of 16 is negated

// Sums and differences of elements 4, 2 and 1 apart, after those 8 apart.
__device__ __forceinline__ void hadamard8(float (&v)[8]) {
#pragma unroll
    for (int apart = 4; apart >= 1; apart /= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!(i & apart)) {
                const float a = v[i], b = v[i + apart];
                v[i] = __fadd_rn(a, b), v[i + apart] = __fsub_rn(a, b);
            }
}

// Columns of 16 rows, half of each in this lane and half in the one 16 lanes apart, times signs and H / 4: the columns of word k. The
// result is rounded to bf16: element (2 i, 2 i + 1) of column j are the halves of word y[j][i].
__device__ __forceinline__ void rotate_word(const Tile& t, const u32 (&w)[ROWS][WORDS], int k, u32 (&y)[PER_WORD][4]) {
    // The upper half subtracts what is its own: of the two factors that changes the sign of one, by `quarter`.
    const float quarter = t.lane_row & 8 ? -0.25f : 0.25f;
    float column[PER_WORD][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const bool low = MINUS >> i & 1, high = MINUS >> (i + 8) & 1;  // negated
        const float fixed = low ? -0.25f : 0.25f;
        const float mine_times = low != high ? fixed : low ? -quarter : quarter;
        const float yours_times = low == high ? fixed : high ? -quarter : quarter;
        const u32 mine[1] = {w[i][k]}, yours[1] = {__shfl_xor_sync(~0u, w[i][k], 16)};
#pragma unroll
        for (int h = 0; h < PER_WORD; ++h)  // a product by a quarter is exact unless it is subnormal in fp32
            column[h][i] = PER_WORD == 2
                ? fmaf(value(yours, h), yours_times, __fmul_rn(value(mine, h), mine_times))
                : __fadd_rn(__fmul_rn(value(yours, h), yours_times), __fmul_rn(value(mine, h), mine_times));
    }
#pragma unroll
    for (int h = 0; h < PER_WORD; ++h) {
        hadamard8(column[h]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[h][i]) : "f"(column[h][2 * i + 1]), "f"(column[h][2 * i]));
    }
}

// All columns of this thread.
__device__ __forceinline__ void rotate(const Tile& t, const u32 (&w)[ROWS][WORDS], u32 (&y)[8][4]) {
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        u32 columns[PER_WORD][4];
        rotate_word(t, w, k, columns);
#pragma unroll
        for (int h = 0; h < PER_WORD; ++h)
#pragma unroll
            for (int i = 0; i < 4; ++i) y[k * PER_WORD + h][i] = columns[h][i];
    }
}

__device__ __forceinline__ u32 bf16_amax_bits(u32 magnitude) { return amax_bits(__uint_as_float(magnitude << 16)); }

// The largest magnitude of a column, with any signs, as bf16 bits in either half.
__device__ __forceinline__ u32 column_amax(const u32 (&y)[4]) {
    return larger_bf16(larger_bf16(y[0], y[1]), larger_bf16(y[2], y[3]));
}

// The amaxes of two columns, as bf16 bits in one word.
__device__ __forceinline__ u32 together_amax(u32 first, u32 second) {
    return 0x7fff7fffu & larger_bf16(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

// The largest magnitude of each rotated column of this thread, as bf16 bits: columns 2 k, 2 k + 1 in word k.
__device__ __forceinline__ void rotated_amax(const u32 (&y)[8][4], u32 (&amax)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) amax[k] = together_amax(column_amax(y[2 * k]), column_amax(y[2 * k + 1]));
}

// The same of columns that are not kept, as words of what the input holds: bf16 bits in 16 bits, or fp32.
__device__ __forceinline__ void rotated_amax(const Tile& t, const u32 (&w)[ROWS][WORDS], u32 (&amax)[WORDS]) {
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        u32 y[PER_WORD][4];
        rotate_word(t, w, k, y);
        const u32 first = column_amax(y[0]);
        amax[k] = PER_WORD == 2 ? together_amax(first, column_amax(y[PER_WORD - 1])) : together_amax(first, first) << 16;
    }
}

// H / 4 times a column of 16 rows, half of which is in this lane and half in the one 16 lanes apart.
__device__ __forceinline__ void hadamard16(bool upper, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 0.25f * fmaf(v[i], upper ? -1.0f : 1.0f, __shfl_xor_sync(~0u, v[i], 16));
    hadamard8(v);
}

// Half of a group of 16 columns, of which the next lane or the one before has the other half, times H and signs. All threads
// of the warp call this.
__device__ __forceinline__ void unrotate(bool upper, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j)  // their sum or their difference: the product is exact
        v[j] = fmaf(v[j], upper ? -1.0f : 1.0f, __shfl_xor_sync(~0u, v[j], 1));
    hadamard8(v);
    const u32 minus = MINUS >> (upper ? 8 : 0);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j], minus >> j & 1 ? -1.0f : 1.0f);
}

// Whether the two halves of a block of 16 rows are in lanes 16 apart. Sides that look for it there ask; what they ask is a
// template, so that tiles of rows alone can be wider.
template <bool SQUARE>
constexpr bool halves_are_16_apart = ABREAST == 16;

// This thread's elements of one column, of rotated ones or of others. ANEW: they are unpacked here.
template <bool ROTATED, bool ANEW>
__device__ __forceinline__ void column_of(const u32 (&w)[ROWS][WORDS], const u32 (&y)[8][4], int j, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 word[1] = {ROTATED ? y[j][i / 2] : w[i][j / PER_WORD]};
        if (ANEW) keep_apart(word);
        if (ROTATED)
            v[i] = __uint_as_float(i & 1 ? word[0] & 0xffff0000u : word[0] << 16);
        else
            v[i] = value(word, j % PER_WORD);
    }
}
