// Sections: rows of a matrix that are encoded by themselves, in one launch (LPQ_SECTIONS). They are groups of rows, which end
// where a tensor on the device says, or the matrices of a stack, which all have as many rows.
//
// A tile is of one section. Its rows lie in the matrix, and in a row operand, where they are. Along a line of a column operand
// each group begins at a multiple of `unit`; the matrices of a stack have lines of their own.
#pragma once

struct Sections {
    const int* ends;         // where each group ends; null: of a stack
    alignas(8) u32 count;
    i64 tall;                // rows of each matrix of a stack
    alignas(8) u32 unit;
    i64 line;                // how long a line of the column operand is
};

// The section of a tile, and what part of it the tile is.
struct Section {
    u32 number = 0, part = 0;  // `number` is the count of sections where there is none
    i64 begin = 0, end = 0;    // its rows in the matrix
    i64 top = 0, bottom = 0;   // its place along a line of the column operand, what it is padded with included
};

// The section of the tiles of `high` rows with this number down the matrix. Each section has one at least. All threads of a warp
// call this.
__device__ __forceinline__ Section section_of(const Sections& s, u32 down, u32 high) {
    Section found;
    if (!s.ends) {
        const u32 parts = max((u32)((s.tall + high - 1) / high), 1u);
        found.number = down / parts, found.part = down - found.number * parts;
        found.begin = found.number * s.tall, found.end = found.begin + s.tall, found.bottom = s.tall;
        return found;
    }
    const u32 lane = threadIdx.x & 31;
    u32 parts_before = 0, units_before = 0;
    found.number = s.count;
    for (u32 first = 0; first < s.count; first += 32) {
        const u32 i = first + lane;
        const bool there = i < s.count;
        const u32 end = there ? s.ends[i] : 0, begin = there && i ? s.ends[i - 1] : 0;
        const u32 own_parts = there ? max((end - begin + high - 1) / high, 1u) : 0;
        const u32 own_units = (end - begin + s.unit - 1) / s.unit;
        u32 parts = 0, all_parts = own_parts, units = 0, all_units = own_units;  // before this lane, and of as many lanes as yet
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const u32 other_parts = __shfl_xor_sync(~0u, all_parts, apart), other_units = __shfl_xor_sync(~0u, all_units, apart);
            if (lane & apart) parts += other_parts, units += other_units;
            all_parts += other_parts, all_units += other_units;
        }
        if (down < parts_before + all_parts) {
            parts += parts_before, units += units_before;
            const bool mine = down >= parts && down < parts + own_parts;
            found.number = __reduce_max_sync(~0u, mine ? i : 0);
            found.part = __reduce_max_sync(~0u, mine ? down - parts : 0);
            found.begin = __reduce_max_sync(~0u, mine ? begin : 0), found.end = __reduce_max_sync(~0u, mine ? end : 0);
            found.top = (i64)__reduce_max_sync(~0u, mine ? units : 0) * s.unit;
            found.bottom = found.top + (i64)__reduce_max_sync(~0u, mine ? own_units : 0) * s.unit;
            return found;
        }
        parts_before += all_parts, units_before += all_units;
    }
    return found;
}
