// The largest magnitude of each section, and zeros where products leave whatever lies there.
#define LPQ_SECTIONS
#include "tile.cuh"

// The amax of each section, which must be 0 before, as fp32 bits.
extern "C" __global__ void __launch_bounds__(THREADS, fitting<REGISTERS>) section_amaxes(
    const void* x, u32* amaxes, const Sections sections, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(sections, rows, cols, blockIdx.x);
    if (t.section() == sections.count) return;
    u32 w[ROWS][WORDS];
    load(t, x, w);
    __shared__ Largest largest;
    const u32 amax = block_max(thread_amax(w), largest);
    if (threadIdx.x == 0 && amax > *(volatile u32*)(amaxes + t.section())) atomicMax(amaxes + t.section(), amax);
}

// Bytes from `first` on of `count` are set to zero, by all blocks together.
__device__ __forceinline__ void clear(u8* to, i64 first, i64 count) {
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    if (((u64)(to + first) | (u64)count) % 16 == 0) {
        for (i64 i = first + 16 * thread; i < count; i += 16 * threads) *(uint4*)(to + i) = make_uint4(0, 0, 0, 0);
    } else {
        for (i64 i = first + thread; i < count; i += threads) to[i] = 0;
    }
}

// The rows of no group, `bytes` long, behind the last group.
extern "C" __global__ void __launch_bounds__(256) clear_rows(u8* out, const int* ends, i64 groups, i64 rows, i64 bytes) {
    wait_for_the_one_before();
    clear(out, ends[groups - 1] * bytes, rows * bytes);
}

// The matrices of groups without rows, `bytes` large.
extern "C" __global__ void __launch_bounds__(256) clear_matrices(u8* out, const int* ends, i64 groups, i64 bytes) {
    wait_for_the_one_before();
    for (i64 group = 0; group < groups; ++group)
        if (ends[group] == (group ? ends[group - 1] : 0)) clear(out + group * bytes, 0, bytes);
}

// Where each group ends along lines in which it is padded to a multiple of `unit`. One warp.
extern "C" __global__ void __launch_bounds__(32) pad_ends(const int* ends, int* out, i64 groups, i64 unit) {
    wait_for_the_one_before();
    u32 before = 0;
    for (i64 first = 0; first < groups; first += 32) {
        const i64 i = first + threadIdx.x;
        const u32 size = i < groups ? ends[i] - (i ? ends[i - 1] : 0) : 0;
        u32 padded = (size + (u32)unit - 1) / (u32)unit * (u32)unit, all = padded;
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const u32 other = __shfl_xor_sync(~0u, all, apart);
            if (threadIdx.x & apart) padded += other;
            all += other;
        }
        if (i < groups) out[i] = before + padded;
        before += all;
    }
}
