// MS-EDEN: a group of 128 along the contraction, of which each of eight lanes has a block of 16.
#pragma once
#include "decode.cuh"
#include "philox.cuh"
#include "scales.cuh"
#include "tile.cuh"

namespace eden {

constexpr int PARTS = 8;        // blocks of 16 in a group
constexpr u32 ONE = 0x38;       // E4M3's code of 1
constexpr double LARGEST = 6.0 / (0.93 * 17 / 16);
constexpr float INVERSE = (float)(1.0 / LARGEST);
constexpr float ROOM = (float)(4.0 * 6.0 * 448.0 / (255.99 * LARGEST));
constexpr float ROOT = 0.08838834764831845f;  // 128 ** -0.5
constexpr u32 OF_PASS = 2;      // in place of a direction

__device__ __forceinline__ float from(int part, int apart, float v) {
    const float other = __shfl_xor_sync(~0u, v, apart);
    return part & apart ? __fsub_rn(other, v) : __fadd_rn(v, other);
}

// The signs of a part of a group, which its turn draws: bit i is set where element i is negated.
__device__ __forceinline__ u32 signs(int part, u32 turn) {
    uint4 words[1];
    philox(0, 0, OF_PASS, (u64)turn << 32, words);
    const uint2 half = part & 4 ? make_uint2(words[0].z, words[0].w) : make_uint2(words[0].x, words[0].y);
    return (part & 2 ? half.y : half.x) >> (part & 1 ? 16 : 0);
}

// The Hadamard matrix of 128 times a group.
__device__ __forceinline__ void hadamard(int part, float (&v)[16]) {
#pragma unroll
    for (int apart = PARTS / 2; apart >= 1; apart /= 2)
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = from(part, apart, v[i]);
#pragma unroll
    for (int apart = 8; apart >= 1; apart /= 2)
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (!(i & apart)) {
                const float a = v[i], b = v[i + apart];
                v[i] = __fadd_rn(a, b), v[i + apart] = __fsub_rn(a, b);
            }
}
__device__ __forceinline__ void rotate(int part, u32 minus, float (&v)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(v[i], minus >> i & 1 ? -ROOT : ROOT);
    hadamard(part, v);
}
__device__ __forceinline__ void unrotate(int part, u32 minus, float (&v)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(v[i], ROOT);
    hadamard(part, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(v[i], minus >> i & 1 ? -1.0f : 1.0f);
}

// The amax of an operand, as fp32 bits, of the amax of its matrix.
__device__ __forceinline__ u32 operand_amax(u32 found) {
    const float roomy = __fmul_rn(__uint_as_float(found), ROOM);
    return found >= INF ? found : __float_as_uint(roomy > FLT_MAX_ ? FLT_MAX_ : roomy);
}

// The sum of the group, of the sums of its parts.
__device__ __forceinline__ float of_group(float sum) {
#pragma unroll
    for (int apart = PARTS / 2; apart >= 1; apart /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, apart));
    return sum;
}

// E4M3's number below `scale`, or the next one, by 24 random bits.
__device__ __forceinline__ u32 rounded(float scale, u32 number) {
    const u32 near = cast_pair<E4M3>(scale, 0.0f) & 0xff;
    const u32 below = decode<E4M3>(near) > scale ? near - 1 : near, above = min(below + 1, E4M3::largest);
    const float lower = decode<E4M3>(below), upper = decode<E4M3>(above);
    const float chance = __fmul_rn((float)number, 5.9604645e-08f);  // 2^-24
    const bool up = upper > lower && __fmul_rn(chance, __fsub_rn(upper, lower)) < __fsub_rn(scale, lower);
    return up ? below + 1 : below;
}

// The codes and the scale of a block of 16, which is rotated.
__device__ __forceinline__ uint2 encode(const float (&v)[16], float overall, u32 number, u32& scale_code) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) most = max(most, __float_as_uint(fabsf(v[i])));
    u32 code = block_scale(__uint_as_float(amax_bits(__uint_as_float(most))), __fmul_rn(overall, INVERSE)) & 0xff;
    if (code == 0) code = ONE;
    const float scale = decode<E4M3>(code);
    const float quotient = __frcp_rn(__fmul_rn(scale, __frcp_rn(overall)));
    const float factor = quotient > FLT_MAX_ ? FLT_MAX_ : quotient;
    u32 codes[2] = {};
    float over = 0.0f, under = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float z = __fmul_rn(v[i], factor), size = fabsf(z);
        const u32 n = nearest(size) - ROUND_BITS;
        codes[i / 8] |= (n | (__float_as_uint(z) >> 28 & 8)) << (4 * (i % 8));
        const float square = __fmul_rn(z, z), product = __fmul_rn(size, half_value(n << 9) * 16384.0f);
        over = i ? __fadd_rn(over, square) : square, under = i ? __fadd_rn(under, product) : product;
    }
    over = of_group(over), under = of_group(under);
    const float correction = under == 0.0f ? 1.0f : __fdiv_rn(over, under);
    scale_code = rounded(__fmul_rn(scale, correction), number);
    return make_uint2(codes[0], codes[1]);
}

// A block's elements in fp32 times 2^-11 times its scale, which is exact.
__device__ __forceinline__ void decode_exact(uint2 codes, u32 scale_code, float (&v)[16]) {
    const float raised = decode<E4M3>(scale_code) * 8.0f;  // of the 2^14 that halves lack
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const u32 code = (i < 8 ? codes.x : codes.y) >> (4 * (i % 8));
        v[i] = __fmul_rn(half_value((code & 7) << 9 | (code & 8) << 12), raised);
    }
}

// The factor of elements, in two steps: a large amax would overflow before the last.
struct Factor {
    float first, last;
    __device__ __forceinline__ explicit Factor(float amax) {
        const float shift = amax > 1.0f ? 4096.0f : 1.0f;
        first = __fdiv_rn(amax, shift) * 2048.0f, last = __fmul_rn(shift, (float)(1.0 / 2688.0));
    }
};

// 128 elements along the contraction of LINES lines. Parts of a line are so far apart
// that the lanes of a warp, with eight parts of four lines, read from all banks.
constexpr int LINES = 32;
struct Lines {
    Element of[128 * (LINES + 1) + PARTS * 20];
    __device__ __forceinline__ Element& at(int i, int line) { return of[i * (LINES + 1) + i / 16 * 20 + line]; }

    // This thread's part of the line threadIdx.x / PARTS.
    __device__ __forceinline__ void take(int part, float (&v)[16]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = element_value(at(part * 16 + i, threadIdx.x / PARTS));
    }
};

}  // namespace eden
