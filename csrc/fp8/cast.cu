// FP8: fragments of many matrices. LPQ_CODE: E4M3 or E5M2; LPQ_POW2: 1 where scales are powers of two.
#include "fragments.cuh"
#include "scale.cuh"

struct FP8 {
    typedef u32 Scale;
    static constexpr int BITS = 8;
    static constexpr bool OVERALL = false;

    static __device__ __forceinline__ u32 scale(u32 amax, u32, float& factor) {
        factor = scale_from_amax(amax, largest_value<LPQ_CODE>(), FLT_MAX_, LPQ_POW2);
        return __float_as_uint(__frcp_rn(factor));
    }
    static __device__ __forceinline__ u32 pair(float a, float p, float b, float q) {
        return scale_pair<LPQ_CODE>(a, p, b, q);
    }
};

LPQ_CAST(FP8)
