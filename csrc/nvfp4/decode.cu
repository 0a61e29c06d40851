// NVFP4 as LPQ_OUTPUT, rounded once, in the basis in which it is stored, or with LPQ_ROTATED with the random Hadamard
// transform undone. LPQ_SQUARE: blocks of 16x16 in place of 1x16. LPQ_ROWS: each row has an amax.
// Without an amax: elements times block scales times 2^-11. They have 6 bits at most, so that rounded to bf16 they are exact.
// Strides of scales are given for lines below each other and for blocks side by side.
#include "decode.cuh"
#include "e2m1.cuh"
#include "options.cuh"
#include "rotation.cuh"

// The factor of elements, in two steps: a large amax would overflow before the last.
struct Factor {
    float first, last;
    __device__ __forceinline__ explicit Factor(float amax) {
        const float shift = amax > 1.0f ? 4096.0f : 1.0f;
        first = __fdiv_rn(amax, shift), last = __fmul_rn(shift, (float)(1.0 / 2688.0));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, fitting<64>) decode_tiles(
    const u8* data, const u8* scale, const float* amax, void* out, i64 down, i64 across, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    const i64 blocks = (cols + 15) / 16;
#ifndef LPQ_ROWS
    const float a = amax ? *amax : 2688.0f / 2048;
    const Factor f(a);
    // A quarter of H is exact, and part of the last factor, unless the result is subnormal.
    const bool tiny = ROTATED && a < 8.0779357e-28f;  // 2^-90
    const float second = ROTATED && !tiny ? 0.25f * f.last : f.last;
#endif
    u32 codes[ROWS] = {}, scales[ROWS] = {};
    const bool stored = ROTATED ? t.col < blocks * 16 : t.wide;  // padding that is rotated counts
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (i >= t.high || !stored) continue;
#ifdef LPQ_SQUARE
        const i64 row = (t.row + i) / 16;
#else
        const i64 row = t.row + i;
#endif
        codes[i] = __ldcs((const u32*)(data + ((t.row + i) * blocks) * 8 + t.col / 2));
        scales[i] = __ldg(scale + row * down + t.col / 16 * across);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (!ROTATED && (i >= t.high || !t.wide)) continue;
        const float s = decode<E4M3>(scales[i]) * 16384.0f;
        float v[8];
        decode_e2m1(codes[i], v);
#ifdef LPQ_ROWS
        const Factor f(amax[t.row + i]);
        const float second = f.last;
        const bool tiny = false;
#endif
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(__fmul_rn(__fmul_rn(v[j], s), f.first), second);
        if (tiny)
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] *= 0.25f;
        if (ROTATED) unrotate(threadIdx.x & 1, v);
        if (i < t.high) store_values(out, t.row + i, t.col, cols, v);
    }
}
