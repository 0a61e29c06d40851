// NVFP4: fragments of many matrices, rounded to the nearest.
#include "fragments.cuh"
#include "e2m1.cuh"

struct NVFP4 {
    typedef u8 Scale;
    static constexpr int BITS = 4;
    static constexpr bool OVERALL = true;

    static __device__ __forceinline__ u8 scale(u32 amax, u32 overall, float& factor) {
        const float whole = tensor_scale(overall);
        const u32 code = block_scale(__uint_as_float(amax), __fmul_rn(whole, (float)(1.0 / 6.0)));
        // The bits of E4M3 are those of an fp16 whose exponent is 8 too low.
        const float decoded = code == E4M3::nan ? __uint_as_float(NAN_BITS) : half_value(code << 7) * 256.0f;
        const float quotient = __frcp_rn(__fmul_rn(decoded, __frcp_rn(whole)));
        factor = quotient > FLT_MAX_ ? FLT_MAX_ : quotient;
        return (u8)code;
    }
    // A NaN is a product and so has the sign +.
    static __device__ __forceinline__ u32 code(float x, float factor) {
        const float v = __fmul_rn(x, factor);
        return (nearest(fabsf(v)) & 15) | (__float_as_uint(v) >> 28 & 8);
    }
    static __device__ __forceinline__ u32 pair(float a, float p, float b, float q) {
        return code(a, p) | code(b, q) << 4;
    }
};

LPQ_CAST(NVFP4)
