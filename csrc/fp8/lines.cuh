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

// The largest magnitude of each row of a tile, as fp32 bits.
__device__ __forceinline__ void find_rows(const Tile& t, const u32 (&w)[ROWS][WORDS], u32 (&rows)[TALL]) {
    u32 amax[LINES];
    row_amax(w, amax);
    reduce_lanes<1, 8>(amax);
    if (t.lane_col == 0)
#pragma unroll
        for (int i = 0; i < ROWS; ++i) rows[t.lane_row + i] = amax_bits(value(amax, i));
}

__device__ __forceinline__ void find_cols(const Tile& t, const u32 (&w)[ROWS][WORDS], Columns& columns) {
    u32 amax[WORDS];
    col_amax(w, amax);
    reduce_lanes<16, 16>(amax);
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
        u32 amaxes[TALL];
        alignas(16) float scales[TALL];
    };
    const Lines p;
    Shared& shared;

    __device__ __forceinline__ RowLines(const Lines& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (BLOCKS && (!p.given || p.measured)) find_rows(t, w, shared.amaxes);
    }

    __device__ __forceinline__ void scale(const Tile& t) {
        const i64 row = (i64)t.down * TALL + threadIdx.x;
        const i64 place = BLOCKS ? row * ((t.cols + WIDE - 1) / WIDE) + t.across : row;
        if (threadIdx.x < TALL && row < t.rows)
            shared.scales[threadIdx.x] = line_scale<F>(
                p, BLOCKS ? shared.amaxes[threadIdx.x] : 0,
                p.words ? word_of(t, p.words, threadIdx.x / WIDE, threadIdx.x % WIDE) : (u32*)p.scale + place, place,
                BLOCKS || t.across == 0);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            u32 low, high;
            scale_row<F>(w[i], shared.scales[t.lane_row + i], low, high);
            store_row(t, p.data, i, low, high);
        }
    }
};

template <class F, bool BLOCKS>
struct ColLines : Side {
    typedef Lines Parameters;
    static constexpr bool SCALES = true;
    static constexpr int DOWN = (TALL + WIDE - 1) / WIDE;  // of 128 rows in a tile
    struct Shared {
        Columns columns;
        alignas(16) float scales[DOWN][WIDE];
        Transposed transposed;
    };
    const Lines p;
    Shared& shared;

    __device__ __forceinline__ ColLines(const Lines& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (BLOCKS && (!p.given || p.measured)) find_cols(t, w, shared.columns);
    }

    __device__ __forceinline__ void scale(const Tile& t) {
        const int line = (int)threadIdx.x - (THREADS - DOWN * WIDE), in_tile = line / WIDE;
        const i64 col = (i64)t.across * WIDE + line % WIDE, down = (i64)t.down * DOWN + in_tile;
        const i64 place = BLOCKS ? col * ((t.rows + WIDE - 1) / WIDE) + down : col;
        if (line >= 0 && col < t.cols && down * WIDE < t.rows)
            shared.scales[in_tile][line % WIDE] = line_scale<F>(
                p, BLOCKS ? shared.columns.largest(line % WIDE, in_tile * (WARPS / DOWN), WARPS / DOWN) : 0,
                p.words ? word_of(t, p.words, in_tile, WIDE + line % WIDE) : (u32*)p.scale + place, place,
                BLOCKS || down == 0);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u32 low, high;
            scale_col<F>(w, j, shared.scales[t.lane_row / WIDE][t.lane_col + j], low, high);
            shared.transposed.put(t, j, low, high);
        }
    }

    __device__ __forceinline__ void store(const Tile& t) { shared.transposed.store(t, p.data); }
};

}  // namespace fp8
