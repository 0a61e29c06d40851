// FP8: fragments of many matrices. LPQ_CODE: E4M3 or E5M2; LPQ_POW2: 1 where scales are powers of two; LPQ_BLOCKS: 1 where
// a scale covers a block, and is then at most the largest number of the dtype that elements are rounded to.
#include "fragments.cuh"
#include "scale.cuh"

#if LPQ_BLOCKS && defined(LPQ_ROUNDED)
constexpr float LARGEST_SCALE = LPQ_INPUT == LPQ_BF16 ? 3.3895313892515355e+38f : 65504.0f;
#else
constexpr float LARGEST_SCALE = FLT_MAX_;
#endif

struct FP8 {
    typedef u32 Scale;
    static constexpr int BITS = 8;
    static constexpr bool OVERALL = false;

    static __device__ __forceinline__ u32 scale(u32 amax, u32, float& factor) {
        factor = scale_from_amax(amax, largest_value<LPQ_CODE>(), LARGEST_SCALE, LPQ_POW2);
        return __float_as_uint(__frcp_rn(factor));
    }
    static __device__ __forceinline__ u32 pair(float a, float p, float b, float q) {
        return scale_pair<LPQ_CODE>(a, p, b, q);
    }
};

LPQ_CAST(FP8)
