// Puts the pieces that ranks sent of several buffers in their places, by one launch.
#include "numbers.cuh"

constexpr int THREADS = 256, MOST = 16;
constexpr u32 BYTES = 16384;  // that one block of threads puts in place

// As the arguments that lpq.kernels.placing passes: 8 bytes for each field.
struct Part {
    const u8* from;
    u8* to;
    u64 shape;         // the lines of the buffer, times 2^32, and the ranks, of which each sent a piece of each line
    u64 piece, apart;  // the bytes of a piece; those from what one rank sent to what the next one did
};

struct Parts {
    Part of[MOST];
};

__device__ __forceinline__ u64 bytes_of(const Part& p) { return (p.shape >> 32) * (u32)p.shape * p.piece; }

// Of N elements: where the one comes from that belongs at this place of the buffer.
template <class N>
__device__ __forceinline__ u64 source_of(N at, N piece, N line, u64 apart) {
    const N row = at / line, rest = at - row * line, rank = rest / piece;
    return rank * apart + (u64)row * piece + (rest - rank * piece);
}

template <class T>
__device__ __forceinline__ void place_part(const Part& p, u64 first) {
    constexpr int AT_ONCE = 4;
    const T* from = (const T*)p.from;
    T* to = (T*)p.to;
    const u64 count = bytes_of(p) / sizeof(T), stop = min(count, (first + BYTES) / (u64)sizeof(T));
    const u64 piece = p.piece / sizeof(T), line = piece * (u32)p.shape, apart = p.apart / sizeof(T);
    for (u64 at = first / sizeof(T) + threadIdx.x; at < stop; at += AT_ONCE * THREADS) {
        T v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const u64 here = at + k * THREADS;
            if (here >= stop) continue;
            const bool small = count < (u64)1 << 32;  // 32-bit division is much cheaper
            v[k] = from[small ? source_of<u32>((u32)here, (u32)piece, (u32)line, apart) : source_of(here, piece, line, apart)];
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (at + k * THREADS < stop) to[at + k * THREADS] = v[k];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) place(const __grid_constant__ Parts parts, i64 count) {
    wait_for_the_one_before();
    u32 block = blockIdx.x;
    int i = 0;
    for (; i < count - 1; ++i) {
        const u32 blocks = (u32)((bytes_of(parts.of[i]) + BYTES - 1) / BYTES);
        if (block < blocks) break;
        block -= blocks;
    }
    const Part& p = parts.of[i];
    const u64 first = (u64)block * BYTES, lies = (u64)p.from | (u64)p.to | p.piece | p.apart;
    if (lies % 16 == 0) place_part<uint4>(p, first);
    else if (lies % 4 == 0) place_part<u32>(p, first);
    else place_part<u8>(p, first);
}
