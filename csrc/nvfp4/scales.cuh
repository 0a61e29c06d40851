// NVFP4's scales, the factors that follow from them, and elements times scales.
#pragma once
#include "e2m1.cuh"

// The factor that takes the operand's amax to 6 * 448; 1 where the amax is 0 or not finite.
__device__ __forceinline__ float tensor_scale(u32 amax) {
    if (amax == 0 || amax >= INF) return 1.0f;
    const float scale = __fdiv_rn(2688.0f, __uint_as_float(amax));
    return scale > FLT_MAX_ ? FLT_MAX_ : scale;
}

// A block's E4M3 scale, which saturates: `sixth` is the operand's factor over 6. A NaN stays one.
__device__ __forceinline__ u32 block_scale(float amax, float sixth) {
    return cast_pair<E4M3>(__fmul_rn(amax, sixth), 0.0f);
}

// The significant bits of an operand's elements.
constexpr int SIGNIFICANT = LPQ_INPUT == LPQ_BF16 ? 8 : LPQ_INPUT == LPQ_FP16 ? 11 : 24;

// The significand of an fp32, from 1 to 2.
__device__ __forceinline__ float significand(float x) {
    return __uint_as_float((__float_as_uint(x) & 0x7fffffu) | 0x3f800000u);
}

// Whether a number with BITS significant bits times the factor can be 1/4, 5/4, 5/2 or 5: half-way between two values of
// which the lower one is even. If there is one it is next to that times the inverse of the factor, which is subnormal, and
// says less, where the factor is above 2^126: then it may be.
template <int BITS>
__device__ __forceinline__ bool meets_a_tie(float factor, float inverse) {
    if (BITS == 24 || (factor > 8.507059e37f && factor < FLT_MAX_)) return true;
    constexpr u32 half = 1u << (BITS < 24 ? 23 - BITS : 0);  // of what the last bit stands for
    bool meets = false;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float tie = k ? 1.25f : 1.0f;
        const u32 next = (__float_as_uint(__fmul_rn(significand(inverse), tie)) + half) & (~0u * (2 * half));
        meets = meets || significand(__fmul_rn(__uint_as_float(next), significand(factor))) == tie;
    }
    return meets;
}

// For each scale the factor that a block's elements are multiplied by; its negative where that may give such ties.
struct Factors {
    float of[128];

    // All threads of the block call this and wait for each other before they look a factor up.
    template <int BITS>
    __device__ __forceinline__ void fill(float overall) {
        const u32 code = threadIdx.x;
        if (code >= 128) return;
        // E4M3 has the bits of an fp16 whose exponent is 8 too low.
        const float decoded = code == E4M3::nan ? __uint_as_float(NAN_BITS) : half_value(code << 7) * 256.0f;
        const float inverse = __fmul_rn(decoded, __frcp_rn(overall)), quotient = __frcp_rn(inverse);
        const float factor = quotient > FLT_MAX_ ? FLT_MAX_ : quotient;
        of[code] = meets_a_tie<BITS>(factor, inverse) ? -factor : factor;
    }
};

// Eight elements as values, two to a word, times a block's scale and 2^-11: in bf16, which holds them exactly. Where a
// code is the lowest of a bf16's exponent and the highest of its mantissa, that is 2^-126 of what it says.
template <bool STOCHASTIC, How HOW>
__device__ __forceinline__ uint4 exact(const float (&x)[8], float factor, uint2 bits, float scale) {
    u32 pair[4];
    if (HOW == ANY) {
        const u32 codes = encode_any<STOCHASTIC>(x, fabsf(factor), bits);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 two = codes >> (8 * k);
            pair[k] = (two & 7) << 6 | (two & 8) << 12 | (two & 0x70) << 18 | (two & 0x80) << 24;
        }
    } else {
        const float small_factor = __fmul_rn(fabsf(factor), 1.0f / 16384);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float a = __fmul_rn(x[2 * k], small_factor), b = __fmul_rn(x[2 * k + 1], small_factor);
            const u32 drawn = __byte_perm(k < 2 ? bits.x : bits.y, 0, k % 2 ? 0x4342 : 0x4140);
            const u32 codes = STOCHASTIC ? stochastic_pair(a, b, drawn) : nearest_pair<HOW == TIES>(a, b);
            pair[k] = (codes >> 6 & 0x01c001c0u) | (codes & 0x80008000u);
        }
    }
    const float raised = __fmul_rn(scale, 4.1538375e34f);  // 2^115
    u32 scales;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(scales) : "f"(raised));
#pragma unroll
    for (int k = 0; k < 4; ++k)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair[k]) : "r"(pair[k]), "r"(scales), "r"(0x80008000u));
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}
