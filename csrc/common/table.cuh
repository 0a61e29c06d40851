// Launches over several fp32 matrices, each a line of a table. A line ends with `first`, its first block of threads: blocks
// look up in the table which matrix is theirs. LPQ_ROUNDED: elements are rounded to LPQ_INPUT as they are read.
#pragma once
#include "numbers.cuh"

template <class Line>
__device__ __forceinline__ Line line_here(const Line* table, i64 count) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (table[middle].first <= (i64)blockIdx.x) low = middle;
        else high = middle;
    }
    return table[low];
}

// The bits of an element, once it is read.
__device__ __forceinline__ u32 as_read(u32 bits) {
#ifdef LPQ_ROUNDED
    const u32 word = rounded(__uint_as_float(bits), 0.0f);
    return LPQ_INPUT == LPQ_BF16 ? word << 16 : __float_as_uint(half_value(word & 0xffffu));
#else
    return bits;
#endif
}

// Four elements from the place `at` on; zeros from `stop` on.
__device__ __forceinline__ void load_four(const u32* values, i64 at, i64 stop, u32 (&w)[4]) {
    if (at + 4 <= stop && (u64)(values + at) % 16 == 0) {
        const uint4 all = *(const uint4*)(values + at);
        w[0] = as_read(all.x), w[1] = as_read(all.y), w[2] = as_read(all.z), w[3] = as_read(all.w);
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = at + j < stop ? as_read(values[at + j]) : 0;
}
