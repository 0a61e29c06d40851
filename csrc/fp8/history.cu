// What delayed scaling remembers, after one more step: the newest amax goes to the front of the history, the oldest is
// lost, and the amax for the next step is taken from the history. One block.
#include "tile.cuh"

extern "C" __global__ void __launch_bounds__(1024) remember(
    float* history, float* amax, const float* newest, i64 length, float factor, u32 most_recent
) {
    let_the_next_one_come();
    wait_for_the_one_before();
    const u32 now = __float_as_uint(*newest);
    u32 largest = now;
    // From the end on, a piece at a time: what a piece is moved over has been moved before.
    for (i64 end = length; end > 0; end -= blockDim.x) {
        const i64 at = end - 1 - threadIdx.x;
        const float moved = at > 0 ? history[at - 1] : *newest;
        __syncthreads();
        if (at >= 0) {
            history[at] = moved;
            largest = max(largest, __float_as_uint(moved));  // magnitudes order as their bits do, NaN above infinity
        }
    }
    __shared__ Largest all;
    const float recent = __fmul_rn(__uint_as_float(most_recent ? now : block_max(largest, all)), factor);
    if (threadIdx.x == 0 && recent > 0.0f && recent < __uint_as_float(0x7f800000u)) *amax = recent;
}
