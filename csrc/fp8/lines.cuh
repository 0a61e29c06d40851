// FP8 with a scale for each line of an operand, or for each 128 elements of one: the row and the column operand of a
// tile. Amaxes that are given are used; those of blocks are measured if they are not, and written where asked. If there
// are `words`, the scales of blocks go there: see untile.cu.
#pragma once
#include "scale.cuh"
#include "side.cuh"

namespace fp8 {

struct Lines {
    u8* data;
    float* scale;
    const u32* given;
    u32 *measured, *words;
    alignas(8) float largest_scale;
    alignas(8) u32 pow2;
};

// The largest magnitude of each row of a unit, as fp32 bits.
__device__ __forceinline__ void find_rows(const Tile& t, const u32 (&w)[ROWS][WORDS], u32 (&rows)[UNITS_ACROSS][TALL]) {
    u32 amax[LINES];
    row_amax(w, amax);
    reduce_lanes<1, 8>(amax);
    if (t.lane_col % UNIT == 0)
#pragma unroll
        for (int i = 0; i < ROWS; ++i) rows[t.lane_col / UNIT][t.lane_row + i] = amax_bits(value(amax, i));
}

__device__ __forceinline__ void find_cols(const Tile& t, const u32 (&w)[ROWS][WORDS], Columns& columns) {
    u32 amax[WORDS];
    col_amax(w, amax);
    reduce_rows(amax);
    columns.put(t, amax);
}

// One line of one operand: its scale, from its own amax or a given one.
template <class F>
__device__ __forceinline__ float line_scale(const Lines& p, u32 own, u32* scale_to, i64 place, bool writes) {
    const u32 amax = p.given ? p.given[place] : own;
    const float scale = scale_from_amax(amax, largest_value<F>(), p.largest_scale, p.pow2);
    if (writes) {
        if (p.measured) p.measured[place] = own;
        store_piece(scale_to, __float_as_uint(__frcp_rn(scale)));
    }
    return scale;
}

template <class F, bool BLOCKS>
struct RowLines : Side {
    typedef Lines Parameters;
    static constexpr bool SCALES = true;
    struct Shared {
        u32 amaxes[UNITS_ACROSS][TALL];
        alignas(16) float scales[UNITS_ACROSS][TALL];
    };
    const Lines p;
    Shared& shared;

    __device__ __forceinline__ RowLines(const Lines& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (BLOCKS && (!p.given || p.measured)) find_rows(t, w, shared.amaxes);
    }

    __device__ __forceinline__ void scale(const Tile& t) {
        const int unit = threadIdx.x / TALL, line = threadIdx.x % TALL;
        const i64 row = (i64)t.down * TALL + line, across = (i64)t.across * UNITS_ACROSS + unit;
        const i64 place = BLOCKS ? row * ((t.cols + UNIT - 1) / UNIT) + across : row;
        if (unit < UNITS_ACROSS && row < t.rows && across * UNIT < t.cols)
            shared.scales[unit][line] = line_scale<F>(
                p, BLOCKS ? shared.amaxes[unit][line] : 0,
                p.words ? word_of(t, p.words, line / UNIT, unit, line % UNIT) : (u32*)p.scale + place, place,
                BLOCKS || across == 0);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            u32 low, high;
            scale_row<F>(w[i], shared.scales[t.lane_col / UNIT][t.lane_row + i], low, high);
            store_row(t, p.data, i, low, high);
        }
    }
};

template <class F, bool BLOCKS>
struct ColLines : Side {
    typedef Lines Parameters;
    static constexpr bool SCALES = true;
    struct Shared {
        Columns columns;
        alignas(16) float scales[UNITS_DOWN][WIDE];
        Transposed transposed;
    };
    const Lines p;
    Shared& shared;

    __device__ __forceinline__ ColLines(const Lines& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (BLOCKS && (!p.given || p.measured)) find_cols(t, w, shared.columns);
    }

    __device__ __forceinline__ void scale(const Tile& t) {
        const int index = (int)threadIdx.x - (THREADS - UNITS_DOWN * WIDE), unit = index / WIDE, line = index % WIDE;
        const i64 col = (i64)t.across * WIDE + line, down = (i64)t.down * UNITS_DOWN + unit;
        const i64 place = BLOCKS ? col * ((t.rows + UNIT - 1) / UNIT) + down : col;
        constexpr int IN_UNIT = WARPS / UNITS_DOWN;  // warps
        if (index >= 0 && col < t.cols && down * UNIT < t.rows)
            shared.scales[unit][line] = line_scale<F>(
                p, BLOCKS ? shared.columns.largest(line, unit * IN_UNIT, IN_UNIT) : 0,
                p.words ? word_of(t, p.words, unit, line / UNIT, line % UNIT) : (u32*)p.scale + place, place,
                BLOCKS || down == 0);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u32 low, high;
            scale_col<F>(w, j, shared.scales[t.lane_row / UNIT][t.lane_col + j], low, high);
            shared.transposed.put(t, j, low, high);
        }
    }

    __device__ __forceinline__ void store(const Tile& t) { shared.transposed.store(t, p.data); }
};

}  // namespace fp8
