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

// The same as a power of two, without a division: the largest value is 1.75 times one.
template <class F>
__device__ __forceinline__ float pow2_from_amax(u32 amax, float largest_scale) {
    constexpr u32 OF_LARGEST = 127 + (F::mantissa == 3 ? 8 : 15);
    if (amax == 0 || amax >= INF) return 1.0f;
    const u32 exponent = 127 + OF_LARGEST - ((amax + 0x1fffff) >> 23);  // one less where the amax is above 1.75 times one
    return __uint_as_float(exponent > 254 ? __float_as_uint(largest_scale) & INF : exponent << 23);
}

// One over such a power of two, which may be subnormal.
__device__ __forceinline__ float one_over_pow2(float scale) {
    const u32 bits = (254u << 23) - __float_as_uint(scale);
    return __uint_as_float(bits ? bits : 0x400000u);
}
