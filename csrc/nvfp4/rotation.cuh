// NVFP4's random Hadamard transform of 16: its signs, and its last three passes.
#pragma once
#include "numbers.cuh"

namespace nvfp4 {

constexpr u32 MINUS = 0xd7e8;  // bit i is set where row i of 16 is negated

// Sums and differences of elements 4, 2 and 1 apart, after those 8 apart.
__device__ __forceinline__ void hadamard8(float (&v)[8]) {
#pragma unroll
    for (int apart = 4; apart >= 1; apart /= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!(i & apart)) {
                const float a = v[i], b = v[i + apart];
                v[i] = __fadd_rn(a, b), v[i + apart] = __fsub_rn(a, b);
            }
}

}  // namespace nvfp4
