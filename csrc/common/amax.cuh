// The side that finds the amax of a matrix, which must be 0 before, in a run before the one that encodes it.
#pragma once
#include "side.cuh"

struct Amax : Side {
    struct Parameters {
        u32* data;
    };
    typedef Largest Shared;
    const Parameters p;
    Shared& shared;

    __device__ __forceinline__ Amax(const Parameters& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile&, const u32 (&w)[ROWS][WORDS]) { shared.put(thread_amax(w)); }
    __device__ __forceinline__ void encode(const Tile&, const u32 (&)[ROWS][WORDS]) {}
    __device__ __forceinline__ void store(const Tile&) {
        if (threadIdx.x >= 32) return;
        const u32 own = shared.of_block();
        if (threadIdx.x == 0 && own > *(volatile u32*)p.data) atomicMax(p.data, own);
    }
};
