// FP8's scale from an amax.
#pragma once
#include "numbers.cuh"

// The factor that takes the amax to the largest value of the element type; 1 where the amax is 0 or not finite.
__device__ __forceinline__ float scale_from_amax(u32 amax, float largest, float largest_scale, u32 pow2) {
    if (amax == 0 || amax >= INF) return 1.0f;
    float scale = __fdiv_rn(largest, __uint_as_float(amax));
    if (scale == __uint_as_float(INF)) scale = largest_scale;
    return pow2 ? __uint_as_float(__float_as_uint(scale) & INF) : scale;
}
