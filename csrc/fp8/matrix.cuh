// FP8 with one scale for the matrix or, if SQUARE, for each 128 x 128 block: the row and the column operand of a tile.
//
// Without SQUARE the amax is the largest of `amaxes` (count of them), which goes to `known` if that is wanted, and
// `measured`, which must be 0 before, gets the amax of the matrix. With it, `amaxes` are the amaxes of the blocks, or null
// to use the blocks' own, which go to `measured` if that is wanted.
//
// DECODED: as in lines.cuh.
#pragma once
#include "decode.cuh"
#include "scale.cuh"
#include "side.cuh"
#include "transposed.cuh"
#include "units.cuh"

namespace fp8 {

struct Matrix {
    u8* data;
    float* scale;
    const u32* amaxes;
    alignas(8) u32 count;
    u32 *known, *measured;
    alignas(8) float largest_scale;
    alignas(8) u32 pow2;
};

#ifdef LPQ_FILLED
constexpr i64 FILLED = 4;
#else
constexpr i64 FILLED = 1;
#endif

// Where the statistic of this thread's elements is, in the row operand and in the column operand; where their scale is,
// each line of which is filled up to a multiple of FILLED; and who writes them.
template <bool SQUARE>
struct Place {
    i64 in_row, in_col, scale_in_row, scale_in_col;
    bool inside, writes;

    __device__ __forceinline__ Place(const Tile& t) {
        const i64 down = t.place() / UNIT, across = t.col / UNIT, tall = t.end() - t.begin();
        const i64 in_a_line = (tall + UNIT - 1) / UNIT, in_a_row = (t.cols + UNIT - 1) / UNIT;
        in_row = SQUARE ? (t.section() * in_a_line + down) * in_a_row + across : t.section();
        in_col = SQUARE ? (t.section() * in_a_row + across) * in_a_line + down : t.section();
        const i64 in_filled_line = (in_a_line + FILLED - 1) / FILLED * FILLED;
        const i64 in_filled_row = (in_a_row + FILLED - 1) / FILLED * FILLED;
        scale_in_row = FILLED > 1 && SQUARE ? down * in_filled_row + across : in_row;
        scale_in_col = FILLED > 1 && SQUARE ? across * in_filled_line + down : in_col;
        inside = !SQUARE || (down * UNIT < tall && across * UNIT < t.cols);
        const bool first = IN_SECTIONS ? t.down + t.across + threadIdx.x == 0 : blockIdx.x + threadIdx.x == 0;
        writes = SQUARE ? inside && t.lane_row % UNIT == 0 && t.lane_col % UNIT == 0 : first;
    }
};

// The memory that the threads of a block share for one side.
struct InBlock {
    Largest amax, measured;
};

struct Factor {
    float of;
    bool finite;  // no element of this warp is infinite, as far as is known
};

// The factor of this thread's elements; `place` is where its statistic is. All threads of the block call this.
template <class F, bool SQUARE>
__device__ __forceinline__ Factor tile_factor(
    const Matrix& p, const u32 (&w)[ROWS][WORDS], const Place<SQUARE>& at, i64 place, InBlock& shared
) {
    u32 amax = 0;
    bool finite = false;
    if (SQUARE) {
        if (p.measured || !p.amaxes) {
            shared.amax.put(thread_amax(w));
            wait_for_the_units();
            amax = of_unit(shared.amax);
            finite = __all_sync(~0u, amax < INF);
        }
        if (p.measured && at.writes) p.measured[place] = amax;
        if (p.amaxes) amax = at.inside ? p.amaxes[place] : 0;
    } else {
        amax = largest_of(p.amaxes + (IN_SECTIONS ? place : 0), p.count, shared.amax);
        if (at.writes && p.known) *p.known = amax;
    }
    return {scale_from_amax(amax, largest_value<F>(), p.largest_scale, p.pow2), finite};
}

// The amax of the matrix, as a by-product: what this thread has to say, and then, after all threads have waited for each
// other, of the block; few blocks have a larger one than was found before.
template <bool SQUARE>
__device__ __forceinline__ void tell_amax(const Matrix& p, const u32 (&w)[ROWS][WORDS], InBlock& shared) {
    if (!SQUARE && p.measured) shared.measured.put(thread_amax(w));
}
template <bool SQUARE>
__device__ __forceinline__ void raise_amax(const Matrix& p, const InBlock& shared) {
    if (SQUARE || !p.measured || threadIdx.x >= 32) return;
    const u32 own = shared.measured.of_block();
    if (threadIdx.x == 0 && own > *(volatile u32*)p.measured) atomicMax(p.measured, own);
}

// All elements of this thread, a row after the other.
template <class F, bool SQUARE>
__device__ __forceinline__ void scale_rows(
    const u32 (&w)[ROWS][WORDS], const Factor& factor, u32 (&low)[ROWS], u32 (&high)[ROWS]
) {
    if (SQUARE && factor.finite)
#pragma unroll
        for (int i = 0; i < ROWS; ++i) scale_row<F, true>(w[i], factor.of, low[i], high[i]);
    else
#pragma unroll
        for (int i = 0; i < ROWS; ++i) scale_row<F>(w[i], factor.of, low[i], high[i]);
}

template <class F, bool SQUARE, bool DECODED = false>
struct RowMatrix : Side {
    typedef Matrix Parameters;
    static constexpr bool WAITS = false;
    typedef InBlock Shared;
    const Matrix p;
    Shared& shared;
    Factor factor;

    __device__ __forceinline__ RowMatrix(const Matrix& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        const Place<SQUARE> at(t);
        factor = tile_factor<F>(p, w, at, at.in_row, shared);
        if (at.writes && !DECODED) p.scale[at.scale_in_row] = __frcp_rn(factor.of);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        u32 low[ROWS], high[ROWS];
        tell_amax<SQUARE>(p, w, shared);
        scale_rows<F, SQUARE>(w, factor, low, high);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (DECODED)
                store_decoded(t, p.data, i, decoded<F>(low[i], high[i], __frcp_rn(factor.of)));
            else
                store_row(t, p.data, i, low[i], high[i]);
    }

    __device__ __forceinline__ void store(const Tile&) { raise_amax<SQUARE>(p, shared); }
};

template <class F, bool SQUARE, bool DECODED = false>
struct ColMatrix : Side {
    typedef Matrix Parameters;
    struct Shared {
        OnItsWay<DECODED> transposed;
        InBlock in_block;
    };
    const Matrix p;
    Shared& shared;
    Factor factor;

    __device__ __forceinline__ ColMatrix(const Matrix& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        const Place<SQUARE> at(t);
        factor = tile_factor<F>(p, w, at, at.in_col, shared.in_block);
        if (at.writes && !DECODED) p.scale[at.scale_in_col] = __frcp_rn(factor.of);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        u32 low[ROWS], high[ROWS];
        tell_amax<SQUARE>(p, w, shared.in_block);
        if constexpr (DECODED) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                scale_col<F>(w, j, factor.of, low[j], high[j]);
                shared.transposed.put(t, j, decoded<F>(low[j], high[j], __frcp_rn(factor.of)));
            }
        } else {
            scale_rows<F, SQUARE>(w, factor, low, high);
            shared.transposed.put_rows(t, low, high);
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        raise_amax<SQUARE>(p, shared.in_block);
        shared.transposed.store(t, p.data);
    }
};

}  // namespace fp8
