// Random bits as a pure function of a seed and an element's place: Philox 4x32-10.
//
// Element (row, col) of an operand takes byte col % 16 of what the counter (col / 16, row, direction, 0) gives.
#pragma once
#include "numbers.cuh"

// For N rows from `row` on, which take the same keys.
template <int N>
__device__ __forceinline__ void philox(u32 group, u32 row, u32 direction, u64 seed, uint4 (&c)[N]) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int n = 0; n < N; ++n) c[n] = make_uint4(group, row + n, direction, 0);
#pragma unroll
    for (int i = 0; i < 10; ++i) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const u64 p0 = (u64)c[n].x * 0xD2511F53u, p1 = (u64)c[n].z * 0xCD9E8D57u;
            c[n] = make_uint4((u32)(p1 >> 32) ^ c[n].y ^ k0, (u32)p1, (u32)(p0 >> 32) ^ c[n].w ^ k1, (u32)p0);
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

// The bits of 8 elements in each of 2 N lines. A group of 16 belongs to this lane and to the one whose number differs by
// `apart`: each draws for N lines. `upper`: this lane has the group's last 8.
template <int N2>
__device__ __forceinline__ void draw(
    u32 group, u32 line, u32 direction, u64 seed, bool upper, int apart, uint2 (&bits)[N2]
) {
    constexpr int N = N2 / 2;
    uint4 c[N];
    philox(group, line + (upper ? N : 0), direction, seed, c);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const uint2 mine = upper ? make_uint2(c[n].z, c[n].w) : make_uint2(c[n].x, c[n].y);
        const uint2 yours = upper ? make_uint2(c[n].x, c[n].y) : make_uint2(c[n].z, c[n].w);
        const uint2 got = make_uint2(__shfl_xor_sync(~0u, yours.x, apart), __shfl_xor_sync(~0u, yours.y, apart));
        bits[n] = upper ? got : mine;
        bits[N + n] = upper ? mine : got;
    }
}
