// MXFP8: fragments of many matrices. LPQ_CODE: E4M3 or E5M2.
#include "fragments.cuh"

struct MXFP8 {
    typedef u8 Scale;
    static constexpr int BITS = 8;
    static constexpr bool OVERALL = false;

    // The least power of two that brings the amax into range; 255 unless it is finite.
    static __device__ __forceinline__ u8 scale(u32 amax, u32, float& factor) {
        const float least = __fmul_rn(__uint_as_float(amax), (float)(1.0 / (double)largest_value<LPQ_CODE>()));
        const u32 bits = __float_as_uint(least);
        const u32 exponent = bits <= 0x400000u ? 0 : min((bits + 0x7fffffu) >> 23, 255u);
        factor = __uint_as_float(exponent < 254 ? (254 - exponent) << 23 : exponent == 254 ? 0x400000u : 0x200000u);
        return (u8)exponent;
    }
    static __device__ __forceinline__ u32 pair(float a, float p, float b, float q) {
        return scale_pair<LPQ_CODE>(a, p, b, q);
    }
};

LPQ_CAST(MXFP8)
