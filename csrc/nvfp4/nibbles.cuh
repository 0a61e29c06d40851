// Squares of nibbles in registers.
#pragma once
#include "transposed.cuh"

// Nibbles of an 8 x 8 square, one word for each row, as one word for each column; the first one is the lowest.
__device__ __forceinline__ void transpose_8x8(u32 (&n)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // bytes of two rows: first the even columns, then the odd ones
        const u32 a = n[i], b = n[i + 1];
        n[i] = (a & 0x0f0f0f0fu) | (b & 0x0f0f0f0fu) << 4;
        n[i + 1] = (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
    }
    transpose_4x4(n[0], n[2], n[4], n[6]), transpose_4x4(n[1], n[3], n[5], n[7]);
}
