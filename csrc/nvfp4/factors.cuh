// NVFP4: the scales of the blocks of a tile, and the factors of their elements. LPQ_STATS: amaxes of blocks are given or wanted.
#pragma once
#include "ways.cuh"

namespace nvfp4 {

struct Parameters {
    u8 *data, *scale;   // null: not wanted
    u32* amax;          // of the operand, to be written
    const u32* amaxes;  // the largest of them is that
    alignas(8) u32 count;
    const float* given;
    float* measured;
    const u64* seed;
    i64 offset;
};

// The amax of a block: its own, which is written where it is wanted, unless one is given.
__device__ __forceinline__ float block_amax(const Parameters& p, float own, bool first, bool inside, i64 place) {
#ifdef LPQ_STATS
    if (p.measured && first && inside) p.measured[place] = __uint_as_float(amax_bits(own));
    if (p.given) return inside ? p.given[place] : 0.0f;
#endif
    return own;
}

// The amax of an operand, as fp32 bits, of the amax of its matrix.
template <int WAY>
__device__ __forceinline__ u32 operand_amax(u32 bits) {
    if (room<WAY> == 1.0f || bits >= INF) return bits;
    return __float_as_uint(fminf(__fmul_rn(__uint_as_float(bits), room<WAY>), FLT_MAX_));
}

// The amax of the operand and its factors, found once for all tiles of a block of threads. Where each line has an amax, `amaxes`
// and `amax` hold the amaxes of lines, and nothing is done once.
template <int WAY, int BITS>
struct Scales {
    Scaled one;
    float sixth;
    bool roomy;

    __device__ __forceinline__ Scales(const Parameters& p, const Tile& t, Factors& factors, Largest& shared) {
        if constexpr (by_rows<WAY>) return;
        const u32 found = IN_SECTIONS ? p.amaxes[t.section()] : largest_of(p.amaxes, p.count, shared);
        const u32 bits = operand_amax<WAY>(found);
        if constexpr (IN_SECTIONS) {
            if (t.down + t.across + threadIdx.x == 0 && p.amax) p.amax[t.section()] = bits;
        } else {
            if (blockIdx.x == 0 && threadIdx.x == 0 && p.data) *p.amax = bits;
        }
        one = {__uint_as_float(found), tensor_scale(bits)};
        sixth = one.sixth<WAY>(), roomy = one.roomy();
        factors.fill<BITS>(one.overall);
    }

    // The factors of a line, which is not `inside` where it lies outside of the matrix. `first`: this thread writes its amax.
    __device__ __forceinline__ Scaled of(const Parameters& p, i64 line, bool inside, bool first) const {
        if constexpr (!by_rows<WAY>) return one;
        const u32 found = inside ? p.amaxes[line] : 0, bits = operand_amax<WAY>(found);
        if (inside && first && p.amax) p.amax[line] = bits;
        return {__uint_as_float(found), tensor_scale(bits)};
    }
};

// How all elements of a warp are encoded: `plain` and `tied` say whether the elements of this thread are, and may meet ties.
template <bool STOCHASTIC, int BITS>
__device__ __forceinline__ How together(bool plain, bool tied) {
    if (!__all_sync(~0u, plain)) return ANY;
    if (STOCHASTIC) return SHORT;
    return BITS == 24 || __any_sync(~0u, tied) ? TIES : SHORT;
}

// The factors of eight lines of blocks of 16, of this operand or transposed, and how the elements are encoded. Their scales
// go to shared memory, to a block and a line of the tile. This lane has `upper` or lower halves of blocks, `elements(i, v)` of
// line i, and the lane APART from it the others. `lines`: where the amax of the first of the lines is.
template <int WAY, int APART, int BITS, class Codes, class Elements>
__device__ __forceinline__ How line_factors(
    const float (&amax)[8], const Parameters& p, const Scales<WAY, BITS>& scales, const Factors& factors, bool upper,
    int inside, i64 begin, i64 block, i64 blocks, i64 lines, bool first, Codes& codes, int in_tile, int line,
    float (&factor)[8], u32 (&code_of)[8], const Elements& elements
) {
    constexpr bool STOCHASTIC = is_stochastic<WAY>;
    bool plain = by_rows<WAY> || scales.roomy;
    u32 signs = 0, packed[2] = {};
    Scaled scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float a = block_amax(p, amax[i], !upper, i < inside, (begin + i) * blocks + block);
        scaled[i] = scales.of(p, lines + i, i < inside, first);
        code_of[i] = searches<WAY> ? Better<WAY>::candidates(a, scaled[i])
                                   : block_scale(a, by_rows<WAY> ? scaled[i].template sixth<WAY>() : scales.sixth);
    }
    if constexpr (searches<WAY>) Better<WAY>{factors}.template of_lines<APART>(elements, amax, scaled, upper, code_of);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        factor[i] = factor_of<WAY>(factors, scaled[i], code_of[i]);
        plain = plain & (!by_rows<WAY> || scaled[i].roomy()) & is_plain<STOCHASTIC>(amax[i], factor[i]);
        signs |= by_rows<WAY> ? ~0u : __float_as_uint(factor[i]);
        packed[i / 4] |= code_of[i] << (8 * (i % 4));
    }
    codes.put(in_tile, line, packed[0], packed[1]);  // which all threads of a block have
    return together<STOCHASTIC, BITS>(plain, signs >> 31);
}

// The factor of the 16x16 block of which this thread has a quarter, `elements(i, v)` of line i.
template <int WAY, int BITS, int N, class Elements>
__device__ __forceinline__ How square_factors(
    float amax, const Parameters& p, const Scales<WAY, BITS>& scales, const Factors& factors, bool first, i64 place,
    bool inside, u8* to, float (&factor)[N], u32 (&code_of)[N], const Elements& elements
) {
    constexpr bool STOCHASTIC = is_stochastic<WAY>;
    static_assert(!by_rows<WAY>, "a square has lines of several amaxes");
    const float a = block_amax(p, amax, first, inside, place);
    u32 code;
    if constexpr (searches<WAY>)
        code = Better<WAY>{factors}.of_square(elements, amax, scales.one, Better<WAY>::candidates(a, scales.one));
    else
        code = block_scale(a, scales.sixth);
    *to = (u8)code;
#pragma unroll
    for (int i = 0; i < N; ++i) factor[i] = factors.of[code], code_of[i] = code;
    return together<STOCHASTIC, BITS>(scales.roomy && is_plain<STOCHASTIC>(amax, factor[0]), factor[0] < 0.0f);
}

}  // namespace nvfp4
