// E2M1: 8 elements as codes in a word, the first one in the low nibble, and what they stand for.
#pragma once
#include "tile.cuh"

// The values 0 .5 1 1.5 2 3 4 6 make up three uniform grids, of steps 1/2, 1 and 2. Counted in steps, the code is n,
// n + 2 or n + 4, and the least of them is right everywhere. To round to an integer, 2^23 is added: the bits of the sum
// are the bits of 2^23 plus the integer.
constexpr float ROUND = 8388608.0f;
constexpr u32 ROUND_BITS = 0x4b000000u;

__device__ __forceinline__ u32 nearest(float m) {
    const u32 halves = __float_as_uint(fmaf(m, 2.0f, ROUND)), ones = __float_as_uint(m + (ROUND + 2.0f));
    return min(min(halves, ones), min(__float_as_uint(fmaf(m, 0.5f, ROUND + 4.0f)), ROUND_BITS + 7));
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

// How the elements of a block are encoded.
enum How {
    ANY,    // whatever they are
    TIES,   // those that are plain: what is multiplied stays below 7, or is rounded stochastically and is no NaN
    SHORT,  // plain ones, where rounding to the nearest does not meet the ties of Factors
};

// Whether the elements of a block up to `amax` are plain.
template <bool STOCHASTIC>
__device__ __forceinline__ bool is_plain(float amax, float factor) {
    return STOCHASTIC ? amax <= __uint_as_float(INF) : __fmul_rn(amax, fabsf(factor)) < 7.0f;
}

// The short cut. E2M1's magnitudes are the upper bits of fp16's, 14 exponents below, subnormals included, and there are
// 9 bits below a code. So of elements times 2^-14, cut to fp16, a code is what comes of adding a part of its step and
// cutting those bits off: half of the step to round to the nearest, or a random part.
//
// Two elements times 2^-14: sign and code are the upper bits of each half.
__device__ __forceinline__ u32 cut_pair(float a, float b) {
    u32 halves;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(b), "f"(a));
    return halves;
}

// The bits of `a` where the mask has ones, else the bits of `b`. In one instruction, which the compiler does not find.
__device__ __forceinline__ u32 choose(u32 mask, u32 a, u32 b) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
    return r;
}

// 8, which the compiler does not know (no grid has a third dimension): it would shift by 3, on the pipe that is busy.
__device__ __forceinline__ u32 eight() { return 8 * gridDim.z; }

// To the nearest: half of a step is added, so that half-way between two values the upper one is taken. That is right if it
// is even. Else the significand there is 1 or 5/4, where it is 3/2 or 7/4 if the upper one is even. So with TIES what is
// below 1.39 is made smaller by one unit in the last place: all are, after the others were made larger by one.
__device__ __forceinline__ float below_ties(float a) {
    const float unit = 4.2915344e-08f;  // 0.36 * 2^-23
    return __fmul_rz(fmaf(a, unit, a), 0.99999994f);
}
//
// CUTS: what is multiplied may be 7 and more, and becomes 6.
template <bool TIES, bool CUTS = false>
__device__ __forceinline__ u32 nearest_pair(float a, float b) {
    if (TIES) a = below_ties(a), b = below_ties(b);
    const u32 halves = cut_pair(a, b), below = CUTS ? smaller_pair(halves & 0x7fff7fffu, 0x0dff0dffu) : halves;
    return choose(0x80008000u, halves, below * eight() + 0x08000800u);
}

// Stochastically: twice the random byte that is in each half of `drawn` is added; what lies below those bits makes no
// difference. The sum that defines this is rounded to fp32 before it is cut: where it is 2^-26 short of 1/2 it becomes
// 1/2. Adding 2^-26 to the magnitude does that, and nothing else, since a magnitude from 1/4 on is a multiple of 2^-25.
__device__ __forceinline__ u32 stochastic_pair(float a, float b, u32 drawn) {
    const float least = 9.0949470e-13f;  // 2^-40
    const u32 halves = cut_pair(__fadd_rz(fabsf(a), least), __fadd_rz(fabsf(b), least));
    const u32 signs = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
    return choose(0x80008000u, signs, smaller_pair(halves, 0x0e000e00u) * 8 + drawn * 16);  // at most 6
}

// Eight elements, the first one in the low nibble. The factor may be negative.
template <bool STOCHASTIC, How HOW, bool CUTS = false>
__device__ __forceinline__ u32 encode(const float (&x)[8], float factor, uint2 bits) {
    if (HOW == ANY) return encode_any<STOCHASTIC>(x, fabsf(factor), bits);
    const float small_factor = __fmul_rn(fabsf(factor), 1.0f / 16384);
    u32 pair[4];  // elements 0 and 2, 1 and 3, 4 and 6, 5 and 7
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int i = k / 2 * 4 + k % 2;
        const float a = __fmul_rn(x[i], small_factor), b = __fmul_rn(x[i + 2], small_factor);
        const u32 drawn = (k < 2 ? bits.x : bits.y) >> (k % 2 * 8) & 0x00ff00ffu;
        pair[k] = STOCHASTIC ? stochastic_pair(a, b, drawn) : nearest_pair<HOW == TIES, CUTS>(a, b);
    }
    const u32 low = choose(0xf000f000u, pair[1], pair[0] >> 4), high = choose(0xf000f000u, pair[3], pair[2] >> 4);
    return __byte_perm(low, high, 0x7531);
}

// Eight elements of E2M1 in fp32, times 2^-14: their bits are the top bits of an fp16 whose exponent is 14 too low.
__device__ __forceinline__ void decode_e2m1(u32 codes, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // of elements j and j + 4 at once
        const u32 code = codes >> (4 * j), halves = (code << 9 & 0x0e000e00u) | (code << 12 & 0x80008000u);
        v[j] = half_value(halves), v[j + 4] = half_value(halves >> 16);
    }
}

// The nibbles of the elements that lie in the matrix, of 8 of which the first `count` do. The others are 0.
__device__ __forceinline__ u32 nibbles(int count) { return WHOLE || count >= 8 ? ~0u : (1u << (4 * count)) - 1; }

