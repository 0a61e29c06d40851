// NVFP4's numbers: scales, and 8 elements as E2M1 codes in a word, the first one in the low nibble.
#pragma once
#include "numbers.cuh"

// The factor that takes the operand's amax to 6 * 448; 1 where the amax is 0 or not finite.
__device__ __forceinline__ float tensor_scale(u32 amax) {
    if (amax == 0 || amax >= INF) return 1.0f;
    const float scale = __fdiv_rn(2688.0f, __uint_as_float(amax));
    return scale > FLT_MAX_ ? FLT_MAX_ : scale;
}

// A block's E4M3 scale, which saturates: `sixth` is the operand's factor over 6. A NaN stays one.
__device__ __forceinline__ u32 block_scale(float amax, float sixth) {
    return cast_pair<E4M3>(__fmul_rn(amax, sixth), 0.0f) & 0xff;
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

// Of a magnitude below 7, where nothing saturates.
__device__ __forceinline__ u32 nearest_plain(float m) {
    return min(min(__float_as_uint(fmaf(m, 2.0f, ROUND)), __float_as_uint(m + (ROUND + 2.0f))),
               __float_as_uint(fmaf(m, 0.5f, ROUND + 4.0f)));
}

__device__ __forceinline__ u32 nearest(float m) { return min(nearest_plain(m), ROUND_BITS + 7); }

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

// Eight scaled elements, of any kind. A NaN is a product and so has the sign +: its code is 7.
//
// It is not inlined: it is rarely called, and in its many places it would make a kernel a third longer, and 7 % slower.
template <bool STOCHASTIC>
__device__ __noinline__ u32 encode_any(float4 first, float4 last, float factor, uint2 bits) {
    const float x[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
    u32 codes = 0, signs = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const float v = __fmul_rn(x[i], factor), m = fabsf(v);
        const u32 byte = __byte_perm(i < 4 ? bits.x : bits.y, 0, 0x4440 + i % 4);
        codes = codes * 16 + (STOCHASTIC ? stochastic(m, byte) : nearest(m));
        signs = __funnelshift_l(__float_as_uint(v), signs, 4);
    }
    codes -= ROUND_BITS + (ROUND_BITS << 4);  // the later ones were shifted out
    return codes | (signs & 0x88888888u);
}

template <bool STOCHASTIC>
__device__ __forceinline__ u32 encode_any(const float (&x)[8], float factor, uint2 bits) {
    const float4 first = make_float4(x[0], x[1], x[2], x[3]), last = make_float4(x[4], x[5], x[6], x[7]);
    return encode_any<STOCHASTIC>(first, last, factor, bits);
}

// What encode_nearest and encode_stochastic want of elements up to `amax`: numbers that stay below 7, where nothing
// saturates, or a factor that can be made smaller.
template <bool STOCHASTIC>
__device__ __forceinline__ bool is_plain(float amax, float factor) {
    if (STOCHASTIC) return amax <= __uint_as_float(INF) && factor >= 1.9259299e-34f;  // 2^-112
    return __fmul_rn(amax, factor) < 7.0f;
}

// Eight plain elements.
__device__ __forceinline__ u32 encode_nearest(const float (&x)[8], float factor) {
    u32 codes = 0, signs = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        codes = codes * 16 + nearest_plain(__fmul_rn(fabsf(x[i]), factor));
        signs = __funnelshift_l(__float_as_uint(x[i]), signs, 4);
    }
    codes -= ROUND_BITS + (ROUND_BITS << 4);  // the later ones were shifted out
    return codes | (signs & 0x88888888u);
}

// The smaller of two pairs of 16-bit numbers, each half by itself.
__device__ __forceinline__ u32 smaller_pair(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 r;
    asm("min.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    return min(a & 0xffffu, b & 0xffffu) | min(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

// Stochastically: E2M1's magnitudes are the upper bits of fp16's, 14 exponents below, subnormals included. There are 9
// bits below a code, to which twice the random byte is added; what lies below those makes no difference. The sum that
// defines this is rounded to fp32 before it is cut: where it is 2^-26 short of 1/2 it becomes 1/2. Adding 2^-26 to the
// magnitude does that, and nothing else, since a magnitude from 1/4 on is a multiple of 2^-25.
//
// Of two elements times 2^-14, with a random byte for each in `drawn`: the code is in the bits from 9 on of each half.
__device__ __forceinline__ u32 stochastic_pair(float a, float b, u32 drawn) {
    const float a_up = __fadd_rz(fabsf(a), 9.0949470e-13f), b_up = __fadd_rz(fabsf(b), 9.0949470e-13f);  // 2^-40
    u32 m;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(m) : "f"(b_up), "f"(a_up));
    return smaller_pair(m, 0x0e000e00u) + drawn * 2;  // at most 6
}

// The signs of two elements, as the upper bits of both halves.
__device__ __forceinline__ u32 sign_pair(float a, float b) {
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632) & 0x80008000u;
}

__device__ __forceinline__ u32 encode_stochastic(const float (&x)[8], float factor, uint2 bits) {
    const float small_factor = __fmul_rn(factor, 1.0f / 16384);
    u32 pair[4];  // elements 0 and 2, 1 and 3, 4 and 6, 5 and 7: the sign and the code are the upper bits of a half
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int i = k / 2 * 4 + k % 2;
        const float a = __fmul_rn(x[i], small_factor), b = __fmul_rn(x[i + 2], small_factor);
        const u32 drawn = (k < 2 ? bits.x : bits.y) >> (k % 2 * 8) & 0x00ff00ffu;
        pair[k] = (stochastic_pair(a, b, drawn) * 8 & 0x7fff7fffu) | sign_pair(a, b);
    }
    const u32 low = (pair[0] >> 4 & 0x0fff0fffu) | (pair[1] & 0xf000f000u);
    const u32 high = (pair[2] >> 4 & 0x0fff0fffu) | (pair[3] & 0xf000f000u);
    return __byte_perm(low, high, 0x7531);
}

template <bool STOCHASTIC>
__device__ __forceinline__ u32 encode(const float (&x)[8], float factor, bool plain, uint2 bits) {
    if (!plain) return encode_any<STOCHASTIC>(x, factor, bits);
    return STOCHASTIC ? encode_stochastic(x, factor, bits) : encode_nearest(x, factor);
}

// Eight elements as values, two to a word, times a block's scale and 2^-11: in bf16, which holds them exactly. Where a
// code is the lowest of a bf16's exponent and the highest of its mantissa, that is 2^-126 of what it says.
template <bool STOCHASTIC>
__device__ __forceinline__ uint4 exact(const float (&x)[8], float factor, bool plain, uint2 bits, float scale) {
    u32 pair[4];
    if (!plain) {
        const u32 codes = encode_any<STOCHASTIC>(x, factor, bits);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 two = codes >> (8 * k);
            pair[k] = (two & 7) << 6 | (two & 8) << 12 | (two & 0x70) << 18 | (two & 0x80) << 24;
        }
    } else {
        const float small_factor = __fmul_rn(factor, 1.0f / 16384);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float a = x[2 * k], b = x[2 * k + 1];
            u32 m;
            if (STOCHASTIC) {
                const u32 drawn = __byte_perm(k < 2 ? bits.x : bits.y, 0, k % 2 ? 0x4342 : 0x4140);
                m = stochastic_pair(__fmul_rn(a, small_factor), __fmul_rn(b, small_factor), drawn) >> 3 & 0x01c001c0u;
            } else {
                const u32 low = nearest_plain(__fmul_rn(fabsf(a), factor));
                m = (low + (nearest_plain(__fmul_rn(fabsf(b), factor)) << 16)) * 64 - ROUND_BITS * 64;
            }
            pair[k] = m | sign_pair(a, b);
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
