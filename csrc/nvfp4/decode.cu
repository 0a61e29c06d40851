// NVFP4 as LPQ_OUTPUT, rounded once, in the basis in which it is stored. LPQ_SQUARE: blocks of 16x16 in place of 1x16.
// Without an amax: elements times block scales times 2^-11. They have 6 bits at most, so that rounded to bf16 they are exact.
// How far scales are apart is said of those of lines below each other and of blocks side by side.
#include "decode.cuh"

// E2M1 in fp32: its bits are the top bits of an fp16 whose exponent is 14 too low.
__device__ __forceinline__ float decode_e2m1(u32 codes, int i) {
    const u32 code = codes >> (4 * i);
    return half_value((code & 7) << 9 | (code & 8) << 12) * 16384.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS, fitting<64>) decode_tiles(
    const u8* data, const u8* scale, const float* amax, void* out, i64 down, i64 across, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    const i64 blocks = (cols + 15) / 16;
    const float a = amax ? *amax : 2688.0f / 2048, shift = a > 1.0f ? 4096.0f : 1.0f;
    const float first = __fdiv_rn(a, shift), second = __fmul_rn(shift, (float)(1.0 / 2688.0));
    u32 codes[ROWS] = {}, scales[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (i >= t.high || !t.wide) continue;
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
        if (i >= t.high || !t.wide) continue;
        const float s = decode<E4M3>(scales[i]);
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            v[j] = __fmul_rn(__fmul_rn(__fmul_rn(decode_e2m1(codes[i], j), s), first), second);
        store_values(out, t.row + i, t.col, cols, v);
    }
}
