// The side of an operand that is not wanted (see side.cuh).
#pragma once
#include "side.cuh"

struct Nothing : Side {
    static constexpr bool WANTED = false;
    static constexpr bool WAITS = false;
    struct Parameters {
        const void* data;
    };
    struct Shared {};

    __device__ __forceinline__ Nothing(const Parameters&, Shared&, const Tile&) {}
    __device__ __forceinline__ void encode(const Tile&, const u32 (&)[ROWS][WORDS]) {}
};
