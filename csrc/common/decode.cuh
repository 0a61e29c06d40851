// Decoding: 8-bit floats in fp32, and a tile of fp32 values out as LPQ_OUTPUT.
#pragma once
#include "tile.cuh"

#ifndef LPQ_OUTPUT
#define LPQ_OUTPUT LPQ_BF16
#endif

template <class F>
__device__ __forceinline__ float decode(u32 code);

template <>
__device__ __forceinline__ float decode<E5M2>(u32 code) { return half_value(code << 8); }  // the upper byte of an fp16

template <>
__device__ __forceinline__ float decode<E4M3>(u32 code) {
    // The bits are an fp16's whose exponent is 8 too low.
    const float f = half_value((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0f;
    return (code & 0x7f) == 0x7f ? __uint_as_float(NAN_BITS) : f;
}

// The four codes of a word.
template <class F>
__device__ __forceinline__ void decode_pairs(u32 codes, float& a, float& b, float& c, float& d) {
#if __CUDA_ARCH__ >= 890
    u32 low, high;
    if (F::mantissa == 3)
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
            : "=r"(low), "=r"(high) : "r"(codes));
    else
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e5m2x2 %0, a; cvt.rn.f16x2.e5m2x2 %1, b; }"
            : "=r"(low), "=r"(high) : "r"(codes));
    a = half_value(low), b = half_value(low >> 16), c = half_value(high), d = half_value(high >> 16);
#else
    a = decode<F>(codes & 0xff), b = decode<F>(codes >> 8 & 0xff);
    c = decode<F>(codes >> 16 & 0xff), d = decode<F>(codes >> 24);
#endif
}

// Two values in 16 bits each.
__device__ __forceinline__ u32 narrow(float a, float b) {
    u32 r;
#if LPQ_OUTPUT == LPQ_FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
#endif
    return r;
}

// Eight values from a column on of a row of `cols` of them.
__device__ __forceinline__ void store_values(void* out, i64 row, i64 col, i64 cols, const float (&v)[8]) {
    if (col >= cols) return;
#if LPQ_OUTPUT == LPQ_FP32
    float* to = (float*)out + row * cols + col;
    if (WHOLE || (cols % 4 == 0 && col + 8 <= cols)) {
        __stcs((float4*)to, make_float4(v[0], v[1], v[2], v[3]));
        __stcs((float4*)to + 1, make_float4(v[4], v[5], v[6], v[7]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (col + i < cols) to[i] = v[i];
    }
#else
    u16* to = (u16*)out + row * cols + col;
    const u32 w[4] = {narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7])};
    if (WHOLE || cols % 8 == 0) {
        stream(to, make_uint4(w[0], w[1], w[2], w[3]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (col + i < cols) to[i] = (u16)(w[i / 2] >> (16 * (i % 2)));
    }
#endif
}

// The rows of this thread as 8 bytes each; what lies outside is 0.
__device__ __forceinline__ void load_codes(const Tile& t, const u8* x, uint2 (&codes)[ROWS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        codes[i] = make_uint2(0, 0);
        if (i >= t.high || !t.wide) continue;
        const u8* from = x + (t.row + i) * t.cols + t.col;
        if (WHOLE || (t.cols % 8 == 0 && (u64)x % 8 == 0)) {
            codes[i] = __ldcs((const uint2*)from);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (j < t.wide) (j < 4 ? codes[i].x : codes[i].y) |= (u32)from[j] << (8 * (j % 4));
        }
    }
}

// The values of eight codes, times a factor.
template <class F>
__device__ __forceinline__ void decode_line(const uint2& codes, float factor, float (&v)[8]) {
    decode_pairs<F>(codes.x, v[0], v[1], v[2], v[3]), decode_pairs<F>(codes.y, v[4], v[5], v[6], v[7]);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], factor);
}

// The same in bf16.
template <class F>
__device__ __forceinline__ uint4 decoded(u32 low, u32 high, float factor) {
    float v[8];
    decode_line<F>(make_uint2(low, high), factor, v);
    return make_uint4(narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7]));
}

// This thread's row i of such values, of a matrix whose columns are a multiple of 8.
__device__ __forceinline__ void store_decoded(const Tile& t, void* out, int i, uint4 values) {
    if (i < t.high && t.wide) stream((u16*)out + (t.row + i) * t.cols + t.col, values);
}
