// Both sides of a tile, of any two formats.
#pragma once
#include "side.cuh"

// This thread's elements in both operands; `data` is where the row operand goes, null if it is not wanted.
template <class RowSide, class ColSide>
__device__ __forceinline__ void encode_tile(
    const Tile& t, u32 (&w)[ROWS][WORDS], RowSide& row, ColSide& col, const void* data
) {
    row.find(t, w), col.find(t, w);
    // Threads whose elements are here work while others still wait for theirs.
    if (!RowSide::WAITS && data) row.encode(t, w);
    __syncthreads();
    if (RowSide::SCALES || ColSide::SCALES) {
        row.scale(t), col.scale(t);
        __syncthreads();
    }
    // That there is a row operand is not known to the compiler: else it unpacks all elements once for both sides.
    if (RowSide::WAITS && data) row.encode(t, w);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) keep_apart(w[i]);
    col.encode(t, w);
    __syncthreads();
    col.store(t), row.store(t);
}
