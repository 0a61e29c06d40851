// FP8 with a scale for each line of an operand, or for each 128 elements of one: the row and the column operand of a
// tile. Amaxes that are given take the place of those measured, which are written where asked: of blocks LPQ_STATS
// allows for both. The scales of blocks lie column by column, as products read them, or with LPQ_ROW_MAJOR row by row.
//
// DECODED: what the operand stands for goes out in place of it, rounded to bf16, of a matrix whose sizes are multiples of 8.
#pragma once
#include "decode.cuh"
#include "line_amaxes.cuh"
#include "scale.cuh"
#include "transposed.cuh"
#include "units.cuh"

namespace fp8 {

#ifdef LPQ_STATS
constexpr bool STATS = true;
#else
constexpr bool STATS = false;
#endif

// Whether no magnitude of a warp, in words of elements, is infinite or NaN.
template <int N>
__device__ __forceinline__ bool all_finite(const u32 (&amax)[N]) {
    u32 most = amax[0];
#pragma unroll
    for (int k = 1; k < N; ++k) most = larger(most, amax[k]);
    return __all_sync(~0u, (PER_WORD == 2 ? max(most & 0xffffu, most >> 16) : most) < INFINITE);
}

struct Lines {
    u8* data;
    float* scale;
    const u32* given;
    u32* measured;
    alignas(8) float largest_scale;
    alignas(8) u32 pow2;

    // The amax of a line or block at a place, where its own is this.
    template <bool BLOCKS>
    __device__ __forceinline__ u32 amax(u32 own, i64 place) const {
        return (STATS || !BLOCKS) && given ? given[place] : own;
    }
    template <bool BLOCKS>
    __device__ __forceinline__ void measure(u32 own, i64 place) const {
        if (STATS && BLOCKS && measured) measured[place] = own;
    }
};

// BLOCKS: scales are for 128 elements of a line. POW2: and they are powers of two. Every thread finds the scales of its rows by
// itself, as a warp holds all that they are for.
template <class F, bool BLOCKS, bool POW2 = false, bool DECODED = false>
struct RowLines : Side {
    typedef Lines Parameters;
    static constexpr bool SCALES = !POW2, WAITS = !POW2;
    struct Shared {
        u32 amaxes[POW2 ? 1 : UNITS_ACROSS][POW2 ? 1 : TALL];
        alignas(16) float scales[POW2 ? 1 : UNITS_ACROSS][POW2 ? 1 : TALL];
    };
    const Lines p;
    Shared& shared;

    __device__ __forceinline__ RowLines(const Lines& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if constexpr (BLOCKS && !POW2)
            find_rows(t, w, shared.amaxes);
    }

    __device__ __forceinline__ void scale(const Tile& t) {
        if constexpr (!POW2) {
            const int unit = threadIdx.x / TALL, line = threadIdx.x % TALL;
            const i64 row = t.begin() + (i64)t.down * TALL + line, across = (i64)t.across * UNITS_ACROSS + unit;
            const i64 place = BLOCKS ? row * ((t.cols + UNIT - 1) / UNIT) + across : row;
            if (unit >= UNITS_ACROSS || row >= t.end() || across * UNIT >= t.cols) return;
            const u32 own = BLOCKS ? shared.amaxes[unit][line] : 0;
            const float scale = scale_from_amax(p.amax<BLOCKS>(own, place), largest_value<F>(), p.largest_scale, p.pow2);
            shared.scales[unit][line] = scale;
            const i64 column_major = across * t.rows + row;
            if (!DECODED && (BLOCKS || across == 0))
                p.scale[BLOCKS && !ROW_MAJOR ? column_major : place] = __frcp_rn(scale);
            p.measure<BLOCKS>(own, place);
        }
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        float scales[ROWS];
        bool finite = false;
        if constexpr (POW2) {
            u32 amax[LINES];
            row_amax(w, amax);
            reduce_lanes<1, 8>(amax);
            finite = all_finite(amax);
            const i64 across = t.col / UNIT, blocks = (t.cols + UNIT - 1) / UNIT;
            const bool writes = !DECODED && t.lane_col % UNIT == 0;
            float* to = p.scale + across * t.rows + t.row;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const u32 own = amax_bits(value(amax, i));
                const i64 place = (t.row + i) * blocks + across;
                const bool inside = i < t.high && t.wide;
                scales[i] = pow2_from_amax<F>(inside ? p.amax<true>(own, place) : 0, p.largest_scale);
                if (writes && inside) p.measure<true>(own, place);
                if (ROW_MAJOR && writes && inside) p.scale[place] = one_over_pow2(scales[i]);
                if (!ROW_MAJOR && !WHOLE && writes && inside) to[i] = one_over_pow2(scales[i]);
            }
            if (!ROW_MAJOR && WHOLE && writes) {
                u32 bits[ROWS];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) bits[i] = __float_as_uint(one_over_pow2(scales[i]));
#pragma unroll
                for (int i = 0; i < ROWS; i += 4)
                    store_piece(to + i, make_uint4(bits[i], bits[i + 1], bits[i + 2], bits[i + 3]));
            }
        } else {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) scales[i] = shared.scales[t.lane_col / UNIT][t.lane_row + i];
        }
        if (POW2 && finite)
            write<true>(t, w, scales);
        else
            write<false>(t, w, scales);
    }

    template <bool FINITE>
    __device__ __forceinline__ void write(const Tile& t, const u32 (&w)[ROWS][WORDS], const float (&scales)[ROWS]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            u32 low, high;
            scale_row<F, FINITE>(w[i], scales[i], low, high);
            if (DECODED)
                store_decoded(t, p.data, i, decoded<F>(low, high, POW2 ? one_over_pow2(scales[i]) : __frcp_rn(scales[i])));
            else
                store_row(t, p.data, i, low, high);
        }
    }
};

template <class F, bool BLOCKS, bool POW2 = false, bool DECODED = false>
struct ColLines : Side {
    typedef Lines Parameters;
    static constexpr bool SCALES = true;
    struct Shared {
        Columns columns;
        alignas(16) float scales[UNITS_DOWN][WIDE];
        OnItsWay<DECODED> transposed;
    };
    const Lines p;
    Shared& shared;

    __device__ __forceinline__ ColLines(const Lines& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (BLOCKS) find_cols(t, w, shared.columns);
    }

    __device__ __forceinline__ void scale(const Tile& t) {
        const int index = (int)threadIdx.x - (THREADS - UNITS_DOWN * WIDE), unit = index / WIDE, line = index % WIDE;
        const i64 col = (i64)t.across * WIDE + line, down = t.top() / UNIT + (i64)t.down * UNITS_DOWN + unit;
        const i64 place = BLOCKS ? col * ((t.rows + UNIT - 1) / UNIT) + down : t.section() * t.cols + col;
        constexpr int IN_UNIT = WARPS / UNITS_DOWN;  // warps
        if (index < 0 || col >= t.cols || (BLOCKS && down * UNIT >= t.bottom())) return;
        const u32 own = BLOCKS ? shared.columns.largest(line, unit * IN_UNIT, IN_UNIT) : 0, amax = p.amax<BLOCKS>(own, place);
        float* to = p.scale + (BLOCKS && !ROW_MAJOR ? down * t.all_lines() + t.lines() + col : place);
        p.measure<BLOCKS>(own, place);
        if (POW2) {
            const float scale = pow2_from_amax<F>(amax, p.largest_scale);
            shared.scales[unit][line] = own < INF ? scale : -scale;  // the sign: an element may be infinite
            if (!DECODED) store_piece(to, __float_as_uint(one_over_pow2(scale)));
        } else {
            const float scale = scale_from_amax(amax, largest_value<F>(), p.largest_scale, p.pow2);
            shared.scales[unit][line] = scale;
            if (!DECODED && (BLOCKS || (t.down == 0 && unit == 0))) *to = __frcp_rn(scale);
        }
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        float scales[8], least = 1.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            scales[j] = shared.scales[t.lane_row / UNIT][t.lane_col + j], least = fminf(least, scales[j]);
        if (POW2 && __all_sync(~0u, least > 0.0f))
            put<true>(t, w, scales);
        else
            put<false>(t, w, scales);
    }

    template <bool FINITE>
    __device__ __forceinline__ void put(const Tile& t, const u32 (&w)[ROWS][WORDS], const float (&scales)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u32 low, high;
            const float scale = POW2 && !FINITE ? fabsf(scales[j]) : scales[j];
            scale_col<F, FINITE>(w, j, scale, low, high);
            if constexpr (DECODED)
                shared.transposed.put(t, j, decoded<F>(low, high, POW2 ? one_over_pow2(scale) : __frcp_rn(scale)));
            else
                shared.transposed.put(t, j, low, high);
        }
    }

    __device__ __forceinline__ void store(const Tile& t) { shared.transposed.store(t, p.data); }
};

}  // namespace fp8
