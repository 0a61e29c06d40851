// The amaxes of the lines of an operand: of the rows or of the columns of a matrix, or of each of its sections.
#pragma once
#include "side.cuh"

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

// In place of an operand the amaxes of its lines. They must be 0 before; null: they are not wanted.
struct Amaxes {
    u32* data;
};

struct RowAmaxes : Side {
    typedef Amaxes Parameters;
    struct Shared {
        u32 of[UNITS_ACROSS][TALL];
    };
    const Amaxes p;
    Shared& shared;

    __device__ __forceinline__ RowAmaxes(const Amaxes& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (p.data) find_rows(t, w, shared.of);
    }
    __device__ __forceinline__ void encode(const Tile&, const u32 (&)[ROWS][WORDS]) {}
    __device__ __forceinline__ void store(const Tile& t) {
        const int unit = threadIdx.x / TALL, in_unit = threadIdx.x % TALL;
        const i64 row = t.begin() + (i64)t.down * TALL + in_unit;
        if (p.data && unit < UNITS_ACROSS && row < t.end()) atomicMax(p.data + row, shared.of[unit][in_unit]);
    }
};

struct ColAmaxes : Side {
    typedef Amaxes Parameters;
    struct Shared {
        Columns columns;
    };
    const Amaxes p;
    Shared& shared;

    __device__ __forceinline__ ColAmaxes(const Amaxes& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (p.data) find_cols(t, w, shared.columns);
    }
    __device__ __forceinline__ void encode(const Tile&, const u32 (&)[ROWS][WORDS]) {}
    __device__ __forceinline__ void store(const Tile& t) {
        const int line = (int)threadIdx.x - (THREADS - WIDE);
        const i64 col = (i64)t.across * WIDE + line;
        if (p.data && line >= 0 && col < t.cols)
            atomicMax(p.data + t.section() * t.cols + col, shared.columns.largest(line, 0, WARPS));
    }
};
