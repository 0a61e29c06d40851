// E8M0: powers of two as biased exponents, and the exponents of a tile's blocks of 32 on their way.
#pragma once
#include "bytes.cuh"

// 2^(127 - exponent).
template <bool PLAIN>
__device__ __forceinline__ float inverse_of(u32 exponent) {
    if (PLAIN) return __uint_as_float((254 - exponent) << 23);
    return __uint_as_float(exponent < 254 ? (254 - exponent) << 23 : exponent == 254 ? 0x400000u : 0x200000u);
}

// 2^(exponent - 127), or NaN.
__device__ __forceinline__ float power_of_exponent(u32 exponent) {
    return __uint_as_float(exponent == 255 ? NAN_BITS : exponent ? exponent << 23 : 0x400000u);
}

// The same, from what inverse_of gives.
__device__ __forceinline__ float power_of(float inverse) {
    const u32 bits = __float_as_uint(inverse), exponent = bits >> 23 ? 254 - (bits >> 23) : 254;
    return __uint_as_float(bits == 0x200000u ? NAN_BITS : exponent ? exponent << 23 : 0x400000u);
}

// Scales of blocks in eight lines: their exponents go to shared memory, to a block and a line of the tile, and where the
// statistics live is read or written. `amax(i)` and `exponent_of(amax)` say what they follow from.
template <bool PLAIN, class Parameters, class Exponents, class Amax, class ExponentOf>
__device__ __forceinline__ void scales(
    const Amax& amax, const ExponentOf& exponent_of, const Parameters& p, bool first, int count, i64 begin, i64 block,
    i64 blocks, Exponents& exponents, int in_tile, int line, float (&inverse)[8]
) {
    u32 packed[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float a = amax(i);
#ifdef LPQ_STATS
        const bool inside = i < count && block < blocks;
        if (p.measured && first && inside) p.measured[(begin + i) * blocks + block] = __uint_as_float(amax_bits(a));
        if (p.given) a = inside ? p.given[(begin + i) * blocks + block] : 0.0f;
#endif
        const u32 exponent = exponent_of(a);
        inverse[i] = inverse_of<PLAIN>(exponent);
        packed[i / 4] |= exponent << (8 * (i % 4));
    }
    exponents.put(in_tile, line, packed[0], packed[1]);  // which all threads of a block have
}
