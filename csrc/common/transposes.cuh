// Transposes of encoded matrices: what is the same whatever an element is.
#pragma once
#include "transposed.cuh"

// 16 bytes of a row; what lies outside is 0.
__device__ __forceinline__ uint4 load_piece(const u8* x, i64 row, i64 at, i64 rows, i64 width) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row >= rows || at >= width) return v;
    const u8* from = x + row * width + at;
    if (width % 16 == 0 && (u64)x % 16 == 0) {
        load_16_bytes(from, v.x, v.y, v.z, v.w);
    } else {
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (at + i < width) word[i / 4] |= (u32)from[i] << (8 * (i % 4));
        v = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return v;
}

// The matrix to which this block of threads belongs; `block` becomes its number among the blocks of that matrix.
template <int HIGH, int BROAD, class Several>
__device__ __forceinline__ int matrix_here(const Several& several, u32 count, u32& block) {
    int i = 0;
    for (; i < (int)count - 1; ++i) {
        const u64 sizes = several.of[i].sizes;
        const u32 tiles = ((u32)(sizes >> 32) + HIGH - 1) / HIGH * (((u32)sizes + BROAD - 1) / BROAD);
        if (block < tiles) break;
        block -= tiles;
    }
    return i;
}
