// The memory of delayed scaling, after one more step: the newest amax goes to the front of the history, the oldest is
// lost, and the amax for the next step is taken from the history. One block for each of up to three tensors.
#include "tile.cuh"

struct Remembered {
    float *history, *amax;
    const float* newest;
    i64 length;
    alignas(8) float factor;
    alignas(8) u32 most_recent;
};

extern "C" __global__ void __launch_bounds__(1024) remember(Remembered first, Remembered second, Remembered third) {
    let_the_next_one_come();
    wait_for_the_one_before();
    const Remembered& p = blockIdx.x == 0 ? first : blockIdx.x == 1 ? second : third;
    const u32 now = __float_as_uint(*p.newest);
    u32 largest = now;
    // From the end on, a piece at a time: what a piece is moved over has been moved before.
    for (i64 end = p.length; end > 0; end -= blockDim.x) {
        const i64 at = end - 1 - threadIdx.x;
        const float moved = at > 0 ? p.history[at - 1] : *p.newest;
        __syncthreads();
        if (at >= 0) {
            p.history[at] = moved;
            largest = max(largest, __float_as_uint(moved));  // magnitudes order as their bits do, NaN above infinity
        }
    }
    __shared__ Largest all;
    const float recent = __fmul_rn(__uint_as_float(p.most_recent ? now : block_max(largest, all)), p.factor);
    if (threadIdx.x == 0 && recent > 0.0f && recent < __uint_as_float(0x7f800000u)) *p.amax = recent;
}
