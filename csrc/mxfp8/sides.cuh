// MXFP8: the row operand and the column operand of a tile.
//
// A null pointer leaves its part out: without data only the amaxes are measured. An amax that is given takes the place
// of the block's own, which LPQ_STATS allows for. Exponents lie column by column: the exponents of one block of all lines together.
//
// EXACT: what the operand stands for goes out in place of it, in bf16, of a matrix whose sizes are multiples of 8.
#pragma once
#include "decode.cuh"
#include "e8m0.cuh"
#include "side.cuh"
#include "transposed.cuh"

namespace mxfp8 {

struct Parameters {
    u8 *data, *scale;
    const float* given;
    float* measured;
};

// Whether amaxes are plain: exponents are neither the least nor the largest, and no element is infinite.
template <int N>
__device__ __forceinline__ bool are_plain(const u32 (&amax)[N]) {
#ifdef LPQ_STATS
    return false;
#else
    constexpr u32 LEAST = LPQ_INPUT == LPQ_BF16 ? 0x0900 : LPQ_INPUT == LPQ_FP16 ? 1 : 0x09000000;  // not below 2^-109
    u32 most = amax[0], least = amax[0];
#pragma unroll
    for (int k = 1; k < N; ++k) most = larger(most, amax[k]), least = smaller(least, amax[k]);
    if (PER_WORD == 2) most = max(most & 0xffffu, most >> 16), least = min(least & 0xffffu, least >> 16);
    return __all_sync(~0u, most < INFINITE && least >= LEAST);
#endif
}

// The exponent byte of a block: the least power of two that brings its amax into range; 255 unless it is finite.
template <class F, bool PLAIN>
__device__ __forceinline__ u32 exponent_of(float amax) {
    const u32 bits = __float_as_uint(__fmul_rn(amax, (float)(1.0 / (F::mantissa == 3 ? 448.0 : 57344.0))));
    if (PLAIN) return (bits + 0x7fffffu) >> 23;
    return bits <= 0x400000u ? 0 : min((bits + 0x7fffffu) >> 23, 255u);
}

template <class F, bool EXACT = false>
struct Row : Side {
    typedef mxfp8::Parameters Parameters;
    static constexpr bool WAITS = false;
    static constexpr int ACROSS = WIDE / 32;  // blocks in a tile
    struct Shared {
        ByColumns<ACROSS, TALL> exponents;
    };
    const Parameters p;
    Shared& shared;
    const i64 blocks;

    __device__ __forceinline__ Row(const Parameters& p, Shared& shared, const Tile& t)
        : p(p), shared(shared), blocks((t.cols + 31) / 32) {}

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        u32 amax[LINES];
        row_amax(w, amax);
        reduce_lanes<1, 2>(amax);
        if (are_plain(amax))
            write<true>(t, w, amax);
        else
            write<false>(t, w, amax);
    }

    template <bool PLAIN>
    __device__ __forceinline__ void write(const Tile& t, const u32 (&w)[ROWS][WORDS], const u32 (&amax)[LINES]) {
        float inverse[ROWS];
        const auto amax_of = [&](int i) { return value(amax, i); };
        const auto exponent_of = [](float a) { return mxfp8::exponent_of<F, PLAIN>(a); };
        scales<PLAIN>(amax_of, exponent_of, p, t.lane_col % 32 == 0, t.high, t.row, t.col / 32, blocks,
                      shared.exponents, t.lane_col / 32, t.lane_row, inverse);
        if (!p.data) return;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            u32 low, high;
            scale_row<F, PLAIN>(w[i], inverse[i], low, high);
            if (!EXACT)
                store_row(t, p.data, i, low, high);
            else
                store_decoded(t, p.data, i, decoded<F>(low, high, power_of(inverse[i])));
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        if (EXACT || !p.data) return;
        shared.exponents.store(
            threadIdx.x, p.scale, t.begin() + (i64)t.down * TALL, t.end(), t.rows, (i64)t.across * ACROSS, blocks);
    }
};

template <class F, bool EXACT = false>
struct Col : Side {
    typedef mxfp8::Parameters Parameters;
    static constexpr int DOWN = TALL / 32;
    struct Shared {
        ByColumns<DOWN, WIDE> exponents;
        OnItsWay<EXACT> transposed;
        Columns columns;
    };
    const Parameters p;
    Shared& shared;
    const i64 blocks;
    u32 amax[WORDS];

    __device__ __forceinline__ Col(const Parameters& p, Shared& shared, const Tile& t)
        : p(p), shared(shared), blocks((t.bottom() + 31) / 32) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        col_amax(w, amax);
        reduce_rows(amax);
        shared.columns.put(t, amax);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
#pragma unroll
        for (int k = 1; k < 32 / WARP_ROWS; ++k)  // the other rows of a block
            shared.columns.merge(t, threadIdx.x / 32 ^ k, amax);
        if (are_plain(amax))
            write<true>(t, w);
        else
            write<false>(t, w);
    }

    template <bool PLAIN>
    __device__ __forceinline__ void write(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        float inverse[8];
        const auto amax_of = [&](int i) { return value(amax, i); };
        const auto exponent_of = [](float a) { return mxfp8::exponent_of<F, PLAIN>(a); };
        scales<PLAIN>(amax_of, exponent_of, p, t.lane_row % 32 == 0, t.wide, t.col, t.place() / 32, blocks,
                      shared.exponents, t.lane_row / 32, t.lane_col, inverse);
        if (!p.data) return;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u32 low, high;
            scale_col<F, PLAIN>(w, j, inverse[j], low, high);
            if constexpr (EXACT)
                shared.transposed.put(t, j, decoded<F>(low, high, power_of(inverse[j])));
            else
                shared.transposed.put(t, j, low, high);
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        if (!p.data) return;
        shared.transposed.store(t, p.data);
        if (EXACT) return;
        const int thread = (int)threadIdx.x - (THREADS - shared.exponents.TAKEN);
        shared.exponents.store(thread, p.scale + t.lines(), (i64)t.across * WIDE, t.cols, t.all_lines(),
                               t.top() / 32 + (i64)t.down * DOWN, blocks);
    }
};

}  // namespace mxfp8
