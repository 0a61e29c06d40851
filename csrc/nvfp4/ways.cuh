// How an operand's elements are rounded and the scales of its blocks are chosen.
#pragma once
#include "scales.cuh"
#include "decode.cuh"

namespace nvfp4 {

// Elements are rounded to the nearest, stochastically, or so beside scales that leave room, so that none is cut. Or to the
// nearest, with the better of two scales (four over six): by the sum of squares or of magnitudes of the errors, with 448 or 256
// as the largest scale of all where the amax becomes 6. With BY_ROWS each line of the operand has an amax.
enum { NEAREST, RANDOM, UNBIASED, SQUARES_448, MAGNITUDES_448, SQUARES_256, MAGNITUDES_256, BY_ROWS };
template <int WAY>
constexpr int kind = WAY % BY_ROWS;
template <int WAY>
constexpr bool by_rows = WAY >= BY_ROWS;
template <int WAY>
constexpr bool is_stochastic = kind<WAY> == RANDOM || kind<WAY> == UNBIASED;
template <int WAY>
constexpr bool searches = kind<WAY> >= SQUARES_448;
// By how much an operand's amax is larger than the amax of its matrix. E4M3 rounds a scale down by at most 17/16.
template <int WAY>
constexpr float room = kind<WAY> == UNBIASED ? 1.0625f : kind<WAY> >= SQUARES_256 ? 1.75f : 1.0f;

// The amax of a matrix, or of a line, and the factor that follows from it.
struct Scaled {
    float whole, overall;

    __device__ __forceinline__ bool roomy() const {  // no factor is below 2^-112: times 2^-14 it is exact
        return overall > 9.8607613e-32f;             // 2^-103; the largest scale is below 2^9
    }
    // The factor that takes the amax of a block to its scale.
    template <int WAY>
    __device__ __forceinline__ float sixth() const {
        return __fmul_rn(overall, (float)(kind<WAY> == UNBIASED ? 17.0 / 96 : 1.0 / 6));
    }
};

// The factor of elements with a scale. Its negative may meet ties that round up; of lines all may.
template <int WAY>
__device__ __forceinline__ float factor_of(const Factors& factors, const Scaled& scaled, u32 code) {
    if constexpr (by_rows<WAY>) {
        const float quotient = __frcp_rn(__fmul_rn(decode<E4M3>(code), __frcp_rn(scaled.overall)));
        return quotient > FLT_MAX_ ? FLT_MAX_ : quotient;
    } else {
        return factors.of[code];
    }
}

// Four over six, from the registers of a tile.
template <int WAY>
struct Better {
    static constexpr bool ABSOLUTE = kind<WAY> == MAGNITUDES_448 || kind<WAY> == MAGNITUDES_256;
    static constexpr float LARGEST = kind<WAY> >= SQUARES_256 ? 6 * 256.0f : 6 * 448.0f;
    const Factors& factors;

    // Whether the elements of a block up to `amax` are plain with both scales, and so is y in `errors`.
    __device__ __forceinline__ bool is_short(float amax, const Scaled& scaled, u32 codes) const {
        return scaled.roomy() && scaled.whole > 7.8886091e-31f && scaled.whole < 4.1538375e34f  // 2^-100, 2^115
            && is_plain<false>(amax, factor_of<WAY>(factors, scaled, codes & 0xff))
            && is_plain<false>(amax, factor_of<WAY>(factors, scaled, codes >> 8));
    }

    static __device__ __noinline__ float quotient(float y) { return __fdiv_rn(y, LARGEST); }

    // The errors of eight elements with a scale.
    template <bool SHORT_CUT>
    __device__ __forceinline__ void errors(
        const float (&v)[8], const Scaled& scaled, u32 code, float (&error)[8]
    ) const {
        const float factor = factor_of<WAY>(factors, scaled, code), raised = decode<E4M3>(code) * 16384.0f;
        const float small_factor = __fmul_rn(fabsf(factor), 1.0f / 16384);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 pair = SHORT_CUT
                ? magnitudes(__fmul_rn(v[2 * k], small_factor), __fmul_rn(v[2 * k + 1], small_factor))
                : (nearest(fabsf(__fmul_rn(v[2 * k], factor))) << 9 & 0xffffu) |
                      nearest(fabsf(__fmul_rn(v[2 * k + 1], factor))) << 25;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float y = __fmul_rn(__fmul_rn(half_value(h ? pair >> 16 : pair), raised), scaled.whole);
                float decoded;
                if (SHORT_CUT) {  // rounded once, unless something is subnormal or infinite: all significands were tried
                    constexpr float inverse = 1.0f / LARGEST;
                    const float near = __fmul_rn(y, inverse);
                    decoded = fmaf(fmaf(-near, LARGEST, y), inverse, near);
                } else {
                    decoded = quotient(y);
                }
                const float lost = __fsub_rn(decoded, fabsf(v[2 * k + h]));
                error[2 * k + h] = ABSOLUTE ? fabsf(lost) : __fmul_rn(lost, lost);
            }
        }
    }

    // Two plain elements times 2^-14, rounded to E2M1's magnitudes: their codes are the upper bits of each half.
    static __device__ __forceinline__ u32 magnitudes(float a, float b) {
        return (cut_pair(fabsf(below_ties(a)), fabsf(below_ties(b))) + 0x01000100u) & 0x0e000e00u;
    }

    static __device__ __forceinline__ float in_order(const float (&values)[8], float sum) {
#pragma unroll
        for (int k = 0; k < 8; ++k) sum = __fadd_rn(sum, values[k]);
        return sum;
    }

    // The scale of a block whose amax is `amax`, as two codes: with 6, and above it with 4.
    static __device__ __forceinline__ u32 candidates(float amax, const Scaled& scaled) {
        const float base = __fmul_rn(__fdiv_rn(amax, 6.0f), scaled.overall);
        return cast_pair<E4M3>(base, __fmul_rn(1.5f, base));
    }

    // The better of the two scales of eight blocks of which this lane has the elements `lines(i, v)`, a half each, and the lane
    // APART from it the other half; `upper` says that this one's come last.
    template <int APART, bool SHORT_CUT, class Lines>
    __device__ __forceinline__ void of_lines(
        const Lines& lines, const Scaled (&scaled)[8], bool upper, u32 (&codes)[8]
    ) const {
        u32 fours = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float v[8], lost[2];
            lines(i, v);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float error[8];
                errors<SHORT_CUT>(v, scaled[i], codes[i] >> (8 * k) & 0xff, error);
                lost[k] = in_order(error, __shfl_xor_sync(~0u, in_order(error, 0.0f), APART));
            }
            fours |= (u32)(lost[1] < lost[0]) << i;
        }
        const u32 others = __shfl_xor_sync(~0u, fours, APART);
        fours = upper ? fours : others;
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[i] = fours >> i & 1 ? codes[i] >> 8 : codes[i] & 0xff;
    }
    template <int APART, class Lines>
    __device__ __forceinline__ void of_lines(
        const Lines& lines, const float (&amax)[8], const Scaled (&scaled)[8], bool upper, u32 (&codes)[8]
    ) const {
        bool shorter = true;
#pragma unroll
        for (int i = 0; i < 8; ++i) shorter = shorter && is_short(amax[i], scaled[i], codes[i]);
        if (__all_sync(~0u, shorter))
            of_lines<APART, true>(lines, scaled, upper, codes);
        else
            of_lines<APART, false>(lines, scaled, upper, codes);
    }

    // The better of the two scales of a block of 16x16, of which this lane has a quarter. The lanes 1, 16 and 17 from it have
    // the other quarters. The errors of the transposed block have the same sum.
    template <bool SHORT_CUT, class Lines>
    __device__ __forceinline__ u32 of_square(const Lines& lines, const Scaled& scaled, u32 codes) const {
        float lost[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float by_rows = 0.0f, columns[8] = {};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float v[8], error[8];
                lines(i, v);
                errors<SHORT_CUT>(v, scaled, codes >> (8 * k) & 0xff, error);
                by_rows = __fadd_rn(by_rows, in_order(error, 0.0f));
#pragma unroll
                for (int j = 0; j < 8; ++j) columns[j] = __fadd_rn(columns[j], error[j]);
            }
            const float quarter = __fadd_rn(by_rows, in_order(columns, 0.0f));
            const float diagonal = __fadd_rn(quarter, __shfl_xor_sync(~0u, quarter, 17));
            lost[k] = __fadd_rn(diagonal, __shfl_xor_sync(~0u, diagonal, 1));
        }
        return lost[1] < lost[0] ? codes >> 8 : codes & 0xff;
    }
    template <class Lines>
    __device__ __forceinline__ u32 of_square(const Lines& lines, float amax, const Scaled& scaled, u32 codes) const {
        return __all_sync(~0u, is_short(amax, scaled, codes)) ? of_square<true>(lines, scaled, codes)
                                                              : of_square<false>(lines, scaled, codes);
    }
};

}  // namespace nvfp4
