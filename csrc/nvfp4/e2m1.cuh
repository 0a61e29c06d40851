// NVFP4's numbers: scales, and 8 elements as E2M1 codes in a word, the first one in the low nibble.
#pragma once
#include "numbers.cuh"

// The factor that takes the operand's amax to 6 * 448; 1 where the amax is 0 or not finite.
__device__ __forceinline__ float tensor_scale(u32 amax) {
    if (amax == 0 || amax >= INF) return 1.0f;
    const float scale = __fdiv_rn(2688.0f, __uint_as_float(amax));
    return scale > FLT_MAX_ ? FLT_MAX_ : scale;
}

// A block's E4M3 scale: `sixth` is the operand's factor over 6. A NaN stays one.
__device__ __forceinline__ u32 block_scale(float amax, float sixth) {
    const float scaled = __fmul_rn(amax, sixth);
    return cast_pair<E4M3>(scaled > 448.0f ? 448.0f : scaled, 0.0f) & 0xff;
}

// For each scale the factor that a block's elements are multiplied by.
struct Factors {
    float of[128];

    // All threads of the block call this and wait for each other before they look a factor up.
    __device__ __forceinline__ void fill(float overall) {
        const u32 code = threadIdx.x;
        if (code >= 128) return;
        // The bits of E4M3 are those of an fp16 whose exponent is 8 too low.
        const float decoded = code == E4M3::nan ? __uint_as_float(NAN_BITS) : half_value(code << 7) * 256.0f;
        const float quotient = __frcp_rn(__fmul_rn(decoded, __frcp_rn(overall)));
        of[code] = quotient > FLT_MAX_ ? FLT_MAX_ : quotient;
    }
};

// The values 0 .5 1 1.5 2 3 4 6 make up three uniform grids, of steps 1/2, 1 and 2. Counted in steps, the code is n,
// n + 2 or n + 4, and the least of them is right everywhere. To round to an integer, 2^23 is added: the bits of the sum
// are those of 2^23 plus the integer.
constexpr float ROUND = 8388608.0f;
constexpr u32 ROUND_BITS = 0x4b000000u;

__device__ __forceinline__ u32 nearest(float m) {
    const u32 code = min(min(__float_as_uint(fmaf(m, 2.0f, ROUND)), __float_as_uint(m + (ROUND + 2.0f))),
                         __float_as_uint(fmaf(m, 0.5f, ROUND + 4.0f)));
    return min(code, ROUND_BITS + 7);
}

// To either neighbour: a random part r / 256 of the grid's step is added, and the sum rounded down to the grid.
__device__ __forceinline__ u32 stochastic(float m, u32 r) {
    const float half_part = fmaf(__uint_as_float(ROUND_BITS | r), 1.0f / 512, -ROUND / 512);
    const float power = __uint_as_float(__float_as_uint(fmaxf(m, 1.0f)) & INF);  // two steps, below 8
    const float sum = fmaf(half_part, power, m);
    const u32 halves = __float_as_uint(__fmaf_rz(sum, 2.0f, ROUND));
    const u32 ones = __float_as_uint(__fadd_rz(sum, ROUND + 2.0f));
    const u32 code = min(min(halves, ones), __float_as_uint(__fmaf_rz(sum, 0.5f, ROUND + 4.0f)));
    return min(code, ROUND_BITS + 7);
}

// Eight scaled elements. A NaN is a product and so has the sign +: its code is 7.
template <bool STOCHASTIC>
__device__ __forceinline__ u32 encode(const float (&v)[8], uint2 bits) {
    u32 codes = 0, signs = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const float m = fabsf(v[i]);
        const u32 byte = __byte_perm(i < 4 ? bits.x : bits.y, 0, 0x4440 + i % 4);
        const u32 code = STOCHASTIC ? stochastic(m, byte) : nearest(m);
        codes = codes * 16 + code;
        signs = __funnelshift_l(__float_as_uint(v[i]), signs, 4);
    }
    codes -= ROUND_BITS + (ROUND_BITS << 4);  // the later ones were shifted out
    return codes | (signs & 0x88888888u);
}
