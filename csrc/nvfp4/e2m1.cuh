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

// Eight scaled elements, of any kind. A NaN is a product and so has the sign +: its code is 7.
template <bool STOCHASTIC>
__device__ __forceinline__ u32 encode_any(const float (&x)[8], float factor, uint2 bits) {
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
        const float m = __fmul_rn(fabsf(x[i]), factor);
        codes = codes * 16 + min(min(__float_as_uint(fmaf(m, 2.0f, ROUND)), __float_as_uint(m + (ROUND + 2.0f))),
                                 __float_as_uint(fmaf(m, 0.5f, ROUND + 4.0f)));
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
__device__ __forceinline__ u32 encode_stochastic(const float (&x)[8], float factor, uint2 bits) {
    const float small_factor = __fmul_rn(factor, 1.0f / 16384);
    u32 pair[4];  // elements 0 and 2, 1 and 3, 4 and 6, 5 and 7: the sign and the code are the upper bits of a half
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int i = k / 2 * 4 + k % 2;
        const float a = __fmul_rn(x[i], small_factor), b = __fmul_rn(x[i + 2], small_factor);
        const float a_up = __fadd_rz(fabsf(a), 9.0949470e-13f), b_up = __fadd_rz(fabsf(b), 9.0949470e-13f);  // 2^-40
        const u32 drawn = (k < 2 ? bits.x : bits.y) >> (k % 2 * 8) & 0x00ff00ffu;
        u32 m;
        asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(m) : "f"(b_up), "f"(a_up));
        m = smaller_pair(m, 0x0e000e00u) * 8 + drawn * 16;  // at most 6
        const u32 signs = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
        pair[k] = (m & 0x7fff7fffu) | (signs & 0x80008000u);
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
