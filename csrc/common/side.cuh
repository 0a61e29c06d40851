// One side of a pair: the row operand or the column operand of a tile, as pair.cu puts it together with any other.
//
// A side is a struct that has
//   Parameters  what the host says: a struct of 8 bytes for each field, among them `data`, where the operand goes,
//   Shared      what the threads of a block share,
//   (const Parameters&, Shared&, const Tile&)   to be made once for all tiles that a block of threads takes,
// and these steps for each tile, between which all threads of the block wait for each other:
//   find(t, w)    what others need to know of this thread's elements,
//   scale(t)      what is written for the other threads out of that; only if SCALES,
//   encode(t, w)  this thread's elements. Results along rows go to memory,
//   store(t)      results along columns, and what lines of the tile have in common.
// Where encode needs nothing of other threads, it need not wait: WAITS is false, and it may come before the first wait.
// A step that needs no more than others may be left out. A tile's `store` may run while other threads are in the
// next tile's `find`.
#pragma once
#include "tile.cuh"

struct Side {
    static constexpr bool WANTED = true;
    static constexpr bool SCALES = false;
    static constexpr bool WAITS = true;
    static constexpr int NEEDS = REGISTERS;  // registers of a thread

    __device__ __forceinline__ void find(const Tile&, const u32 (&)[ROWS][WORDS]) {}
    __device__ __forceinline__ void scale(const Tile&) {}
    __device__ __forceinline__ void store(const Tile&) {}
};
