// Hopper's own instructions: its tensor cores, which read both operands from shared memory, the engine that copies tiles
// there, and the barriers on which threads wait for these copies.
#pragma once
#include "numbers.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ON_HOPPER(...) asm volatile(__VA_ARGS__)
#else  // compiled, and never run
#define ON_HOPPER(...) __trap()
#endif

// The driver's description of a matrix, for the engine: lpq.kernels.tensor_maps.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void make_barrier(u32 barrier, u32 arrivals) {
    ON_HOPPER("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// After barriers were made: everyone sees them, the engine too.
__device__ __forceinline__ void publish_barriers() {
    ON_HOPPER("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    ON_HOPPER("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u32 barrier, u32 bytes) {
    ON_HOPPER("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Wait until the barrier has ended the phase of this parity.
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    ON_HOPPER(
        "{\n .reg .pred done;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @done bra ready;\n"
        " bra again;\n ready:\n }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Copy the tile of a matrix that begins at (row, byte); there are zeros outside of the matrix.
__device__ __forceinline__ void copy_tile(const TensorMap& map, u32 to, u32 barrier, int byte, int row) {
    ON_HOPPER(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(byte), "r"(row)
        : "memory");
}

// A matrix in shared memory for the tensor cores: lines of 128 bytes, in groups of 8 whose 16 bytes are swizzled.
__device__ __forceinline__ u64 matrix_at(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void begin_products() { ON_HOPPER("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() {
    ON_HOPPER("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define LPQ_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LPQ_16(d, i) LPQ_4(d, i), LPQ_4(d, i + 4), LPQ_4(d, i + 8), LPQ_4(d, i + 12)
#define LPQ_PRODUCT(A, B)                                                                                               \
    ON_HOPPER(                                                                                                       \
        "{\n .reg .pred added;\n setp.ne.b32 added, %66, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n128k32.f32." A "." B                                                          \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "   \
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "     \
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, "    \
        "%65, added, 1, 1;\n }"                                                                                         \
        : LPQ_16(d, 0), LPQ_16(d, 16), LPQ_16(d, 32), LPQ_16(d, 48)                                                     \
        : "l"(a), "l"(b), "r"((int)added))

// d (added: d +) 64 lines of a times 128 lines of b, over 32 elements; each E5M2 or else E4M3.
template <bool A_E5M2, bool B_E5M2>
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, bool added) {
    if constexpr (A_E5M2 && B_E5M2) LPQ_PRODUCT("e5m2", "e5m2");
    else if constexpr (A_E5M2) LPQ_PRODUCT("e5m2", "e4m3");
    else if constexpr (B_E5M2) LPQ_PRODUCT("e4m3", "e5m2");
    else LPQ_PRODUCT("e4m3", "e4m3");
}

// The number of registers of each thread of a warpgroup.
template <int N>
__device__ __forceinline__ void fewer_registers() { ON_HOPPER("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ __forceinline__ void more_registers() { ON_HOPPER("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
