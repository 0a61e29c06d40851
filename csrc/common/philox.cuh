// Random bits as a pure function of a seed and an element's place: Philox 4x32-10.
//
// Element (row, col) of an operand takes byte col % 16 of what the counter (col / 16, row, direction, 0) gives.
#pragma once
#include "numbers.cuh"

__device__ __forceinline__ uint4 philox(u32 group, u32 row, u32 direction, u64 seed) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    uint4 c = make_uint4(group, row, direction, 0);
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        const u64 p0 = (u64)c.x * 0xD2511F53u, p1 = (u64)c.z * 0xCD9E8D57u;
        c = make_uint4((u32)(p1 >> 32) ^ c.y ^ k0, (u32)p1, (u32)(p0 >> 32) ^ c.w ^ k1, (u32)p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c;
}

// The bits of 8 x 8 elements, 8 bytes for each of 8 lines. A group of 16 belongs to this lane and to the one whose
// number differs by `apart`, of which each draws for half of the lines. `upper`: this lane has the group's last 8.
__device__ __forceinline__ void draw(
    u32 group, u32 line, u32 direction, u64 seed, bool upper, int apart, uint2 (&bits)[8]
) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const uint4 c = philox(group, line + k + (upper ? 4 : 0), direction, seed);
        const uint2 mine = upper ? make_uint2(c.z, c.w) : make_uint2(c.x, c.y);
        const uint2 yours = upper ? make_uint2(c.x, c.y) : make_uint2(c.z, c.w);
        const uint2 got =
            make_uint2(__shfl_xor_sync(~0u, yours.x, apart), __shfl_xor_sync(~0u, yours.y, apart));
        bits[k] = upper ? got : mine;
        bits[k + 4] = upper ? mine : got;
    }
}
