// FP8's blocks of 128 x 128 in a tile: the largest magnitude of each, which the threads of it have in common.
#pragma once
#include "tile.cuh"

namespace fp8 {

constexpr int UNITS_DOWN = (TALL + UNIT - 1) / UNIT;  // in a tile

// The largest of the threads that hold elements of the same unit, in every one of them.
__device__ __forceinline__ u32 of_unit(const Largest& largest) {
    constexpr int IN_UNIT = UNIT / WARP_ROWS;  // warps
    const int lane = threadIdx.x & 31, first = threadIdx.x / 32 / IN_UNIT * IN_UNIT;
    if (UNITS_ACROSS == 1) return __reduce_max_sync(~0u, lane < IN_UNIT ? largest.of[first + lane][0] : 0);
    u32 bits = largest.of[first + lane % IN_UNIT][lane / 16 % UNITS_ACROSS];
#pragma unroll
    for (int apart = 1; apart < 16; apart *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, apart));
    return bits;
}

// Threads that hold elements of units side by side wait for each other.
__device__ __forceinline__ void wait_for_the_units() {
    constexpr int THREADS_ = UNIT * WIDE / 64;
    if (THREADS_ == THREADS)
        __syncthreads();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / THREADS_), "n"(THREADS_) : "memory");
}

}  // namespace fp8
