// Numbers: bit patterns of the input dtypes, and exact casts to 8-bit floats. No CUDA header is needed.
//
// LPQ_INPUT says what the input holds. A word is 32 bits: one fp32, or two 16-bit floats, the even column low.
#pragma once
#include "order.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define LPQ_BF16 0
#define LPQ_FP16 1
#define LPQ_FP32 2
#ifndef LPQ_INPUT
#define LPQ_INPUT LPQ_BF16
#endif

constexpr u32 INF = 0x7f800000u;
constexpr u32 NAN_BITS = 0x7fc00000u;  // the one NaN of a statistic
constexpr float FLT_MAX_ = 3.402823466e+38f;

#if LPQ_INPUT == LPQ_FP32
constexpr int PER_WORD = 1;
typedef u32 Element;
#else
constexpr int PER_WORD = 2;
typedef u16 Element;
#endif
constexpr int WORDS = 8 / PER_WORD;  // the words of 8 elements
constexpr u32 INFINITE = LPQ_INPUT == LPQ_FP32 ? INF : LPQ_INPUT == LPQ_BF16 ? INF >> 16 : 0x7c00u;  // as an element

__device__ __forceinline__ float half_value(u32 bits) {
    float f;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "h"((u16)bits));
    return f;
}

// The value of element i of words that hold one element after another.
template <int N>
__device__ __forceinline__ float value(const u32 (&words)[N], int i) {
#if LPQ_INPUT == LPQ_FP32
    return __uint_as_float(words[i]);
#elif LPQ_INPUT == LPQ_BF16
    return __uint_as_float(i & 1 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
#else
    return half_value(i & 1 ? words[i / 2] >> 16 : words[i / 2]);
#endif
}

// Tells the compiler nothing of what these words hold: else what two branches make of them it makes before, once for both,
// and keeps it in more registers than there are.
template <int N>
__device__ __forceinline__ void keep_apart(u32 (&words)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(words[i]));
}

// The value of a single element's bits.
__device__ __forceinline__ float element_value(u32 bits) {
    const u32 word[1] = {bits};
    return value(word, 0);
}

// Two fp32 as a word, a in the low half, rounded to the nearest even. Any NaN becomes a NaN.
__device__ __forceinline__ u32 rounded(float a, float b) {
    u32 word;
#if LPQ_INPUT == LPQ_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
#endif
    return word;
}

// Magnitudes as bits: they order as the numbers do, a NaN above infinity.
__device__ __forceinline__ u32 magnitude(u32 word) {
    return word & (PER_WORD == 1 ? 0x7fffffffu : 0x7fff7fffu);
}

// The larger of two pairs of 16-bit numbers, each half by itself.
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    return max(a & 0xffffu, b & 0xffffu) | max(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

// The smaller of them.
__device__ __forceinline__ u32 smaller_pair(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 r;
    asm("min.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    return min(a & 0xffffu, b & 0xffffu) | min(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

// A word with the larger magnitudes of two words of elements, and with any signs: for 16-bit floats of one kind, and for
// what the input holds.
#define LPQ_LARGER(NAME, TYPE)                                                                   \
    __device__ __forceinline__ u32 NAME(u32 a, u32 b) {                                          \
        u32 r;                                                                                   \
        asm("max.NaN.xorsign.abs." TYPE " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));              \
        return r;                                                                                \
    }
#if __CUDA_ARCH__ >= 890
LPQ_LARGER(larger_bf16, "bf16x2")
LPQ_LARGER(larger_fp16, "f16x2")
#else
__device__ __forceinline__ u32 larger_bf16(u32 a, u32 b) { return larger_pair(a & 0x7fff7fffu, b & 0x7fff7fffu); }
__device__ __forceinline__ u32 larger_fp16(u32 a, u32 b) { return larger_bf16(a, b); }
#endif
__device__ __forceinline__ u32 larger_magnitude(u32 a, u32 b) {
    if (LPQ_INPUT == LPQ_FP32) return max(magnitude(a), magnitude(b));
    return LPQ_INPUT == LPQ_BF16 ? larger_bf16(a, b) : larger_fp16(a, b);
}

__device__ __forceinline__ u32 larger(u32 a, u32 b) { return PER_WORD == 1 ? max(a, b) : larger_pair(a, b); }
__device__ __forceinline__ u32 smaller(u32 a, u32 b) { return PER_WORD == 1 ? min(a, b) : smaller_pair(a, b); }

// The larger half of a word of magnitudes, as the bits of one element.
__device__ __forceinline__ u32 larger_half(u32 word) {
    return PER_WORD == 1 ? word : max(word & 0xffffu, word >> 16);
}

// The fp32 bits of a magnitude; every NaN becomes the one NaN.
__device__ __forceinline__ u32 amax_bits(float magnitude) {
    const u32 bits = __float_as_uint(magnitude);
    return bits > INF ? NAN_BITS : bits;
}

// ------------------------------------------------------------------------------------------ 8-bit floats

struct E4M3 {
    static constexpr u32 largest = 0x7e, nan = 0x7f, mantissa = 3, bias = 7;
    static constexpr float subnormals = 16384.0f;  // what has an ulp of the least subnormal
    static constexpr bool infinities = false;
};
struct E5M2 {
    static constexpr u32 largest = 0x7b, nan = 0x7f, mantissa = 2, bias = 15;
    static constexpr float subnormals = 128.0f;
    static constexpr bool infinities = true;
};

// One fp32 as an 8-bit float by integer arithmetic, for GPUs without the instruction.
template <class F>
__device__ __forceinline__ u32 cast_software(float x) {
    const u32 sign = __float_as_uint(x) >> 24 & 0x80, bits = __float_as_uint(x) & 0x7fffffffu;
    if (bits > INF) return F::nan;
    constexpr u32 cut = 23 - F::mantissa;
    u32 code;
    if (bits < (128 - F::bias) << 23)  // below the least normal number
        code = __float_as_uint(__fadd_rn(__uint_as_float(bits), F::subnormals)) - __float_as_uint(F::subnormals);
    else
        code = ((bits + ((1u << (cut - 1)) - 1) + (bits >> cut & 1)) >> cut) - ((127 - F::bias) << F::mantissa);
    return sign | min(code, F::largest);
}

// Two fp32 as two bytes, a in the low one: to the nearest even, saturating also infinities; NaN is 0x7f.
template <class F>
__device__ __forceinline__ u32 cast_pair(float a, float b);

#if __CUDA_ARCH__ >= 890
template <>
__device__ __forceinline__ u32 cast_pair<E4M3>(float a, float b) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
}
template <>
__device__ __forceinline__ u32 cast_pair<E5M2>(float a, float b) {
    u16 r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
}
#else
template <class F>
__device__ __forceinline__ u32 cast_pair(float a, float b) {
    return cast_software<F>(a) | cast_software<F>(b) << 8;
}
#endif

// a·p and b·q as 8-bit floats. Finite numbers saturate; infinity and NaN stay (in E4M3 as NaN).
template <class F>
__device__ __forceinline__ u32 scale_any(float a, float p, float b, float q);

template <>
__device__ __forceinline__ u32 scale_any<E4M3>(float a, float p, float b, float q) {
    // a·0 is a zero of the product's sign, or NaN.
    return cast_pair<E4M3>(fmaf(a, 0.0f, __fmul_rn(a, p)), fmaf(b, 0.0f, __fmul_rn(b, q)));
}
template <>
__device__ __forceinline__ u32 scale_any<E5M2>(float a, float p, float b, float q) {
    u32 code = cast_pair<E5M2>(__fmul_rn(a, p), __fmul_rn(b, q));
    if (fmaxf(fabsf(a), fabsf(b)) == __uint_as_float(INF)) {
        if (fabsf(a) == __uint_as_float(INF)) code = (code & 0xff80u) | 0x007cu;
        if (fabsf(b) == __uint_as_float(INF)) code = (code & 0x80ffu) | 0x7c00u;
    }
    return code;
}

// FINITE: neither a nor b is infinite.
template <class F, bool FINITE = false>
__device__ __forceinline__ u32 scale_pair(float a, float p, float b, float q) {
    return FINITE ? cast_pair<F>(__fmul_rn(a, p), __fmul_rn(b, q)) : scale_any<F>(a, p, b, q);
}

template <class F>
__device__ __forceinline__ float largest_value();
template <>
__device__ __forceinline__ float largest_value<E4M3>() { return 448.0f; }
template <>
__device__ __forceinline__ float largest_value<E5M2>() { return 57344.0f; }
