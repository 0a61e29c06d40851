// NVFP4: what must be known of a matrix before its rotated columns are encoded. For each block of threads the largest
// magnitude in its tiles, of the matrix and of the rotated one.
#include "sides.cuh"

static_assert(nvfp4::halves_are_16_apart<true>, "tiles are too wide");

extern "C" __global__ void __launch_bounds__(THREADS, fitting<LPQ_INPUT == LPQ_FP32 ? 255 : REGISTERS>) amaxes(
    const void* x, u32* plain, u32* rotated, u32 count, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    u32 in_plain = 0, in_rotated = 0;
    __shared__ Ahead<> ahead;
    ahead.fetch(Tile(rows, cols, blockIdx.x), x);
    for (u32 at = blockIdx.x; at < count; at += gridDim.x) {
        const Tile t(rows, cols, at);
        u32 w[ROWS][WORDS], y[8][4], amax[4];
        ahead.take(t, x, w);
        if (at + gridDim.x < count) ahead.fetch(Tile(rows, cols, at + gridDim.x), x);
        if (plain) in_plain = max(in_plain, thread_amax(w));
        nvfp4::rotate(t, w, y);
        nvfp4::rotated_amax(y, amax);
#pragma unroll
        for (int k = 1; k < 4; ++k) amax[0] = larger_pair(amax[0], amax[k]);
        in_rotated = max(in_rotated, nvfp4::bf16_amax_bits(max(amax[0] & 0xffffu, amax[0] >> 16)));
    }
    __shared__ Largest of_plain, of_rotated;
    if (plain) {
        in_plain = block_max(in_plain, of_plain);
        if (threadIdx.x == 0) plain[blockIdx.x] = in_plain;
    }
    in_rotated = block_max(in_rotated, of_rotated);
    if (threadIdx.x == 0) rotated[blockIdx.x] = in_rotated;
}
