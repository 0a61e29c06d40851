// NVFP4 by MS-EDEN as LPQ_OUTPUT, rounded once, with the rotation undone.
#include "eden.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) decode_eden(
    const u8* data, const u8* scale, const float* amax, const u32* turn, void* out, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const int part = threadIdx.x % eden::PARTS;
    const i64 blocks = (cols + 127) / 128 * eden::PARTS, at = (i64)blockIdx.x * THREADS + threadIdx.x;
    const i64 row = at / blocks, col = (at - row * blocks) * 16;
    const bool wanted = row < rows;
    const eden::Factor f(*amax);
    float v[16];
    eden::decode_exact(wanted ? __ldcs((const uint2*)(data + at * 8)) : make_uint2(0, 0), wanted ? scale[at] : 0, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], f.first), f.last);
    eden::unrotate(part, eden::signs(part, *turn), v);
    if (!wanted) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) eight[i] = v[half * 8 + i];
        store_values(out, row, col + half * 8, cols, eight);
    }
}
