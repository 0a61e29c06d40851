// Enough of CUDA to run a kernel's source on the host: the threads of a block take turns, one block after the other.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Place { unsigned x; };
static Place threadIdx, blockIdx;

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline float __uint_as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned bits; memcpy(&bits, &f, 4); return bits; }
// A GPU's NaN is one: positive, whatever the operands were.
inline float one_nan(float f) { return f != f ? __uint_as_float(0x7fffffffu) : f; }
inline float __fmul_rn(float a, float b) { return one_nan(a * b); }
inline float __fadd_rn(float a, float b) { return one_nan(a + b); }
inline float __fdiv_rn(float a, float b) { return one_nan(a / b); }
inline float __frcp_rn(float a) { return one_nan(1.0f / a); }
inline float fused(float a, float b, float c) { return one_nan(std::fma(a, b, c)); }
#define fmaf fused
// Of what is in the headers and does not run here.
float __fadd_rz(float, float);
float __fmaf_rz(float, float, float);
unsigned __byte_perm(unsigned, unsigned, unsigned);
unsigned __funnelshift_l(unsigned, unsigned, unsigned);

// ------------------------------------------------------------------------------------------ threads

constexpr int HOST_THREADS = 256, HOST_STACK = 1 << 16;
static ucontext_t scheduler, contexts[HOST_THREADS];
static std::vector<char> stacks(HOST_THREADS* HOST_STACK);
static std::function<void()> body;
static bool done[HOST_THREADS];
static unsigned exchanged[2][HOST_THREADS], exchanges[HOST_THREADS];
static int arrived[HOST_THREADS];  // barriers that each thread has come to

inline void wait_turn() {
    const unsigned self = threadIdx.x;
    swapcontext(&contexts[self], &scheduler);
}
// Until the threads [first, last) are as far, or have returned.
inline void meet(int first, int last) {
    const int mine = ++arrived[threadIdx.x];
    for (bool all = false; !all;) {
        all = true;
        for (int i = first; i < last; ++i) all = all && (done[i] || arrived[i] >= mine);
        if (!all) wait_turn();
    }
}
inline void __syncthreads() { meet(0, HOST_THREADS); }
inline unsigned __shfl_xor_sync(unsigned, unsigned value, int apart) {
    const int first = threadIdx.x / 32 * 32, slot = exchanges[threadIdx.x]++ % 2;
    exchanged[slot][threadIdx.x] = value;
    meet(first, first + 32);
    return exchanged[slot][threadIdx.x ^ apart];
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
    const unsigned old = *at;
    *at = max(old, value);
    return old;
}
inline void start() {
    body();
    done[threadIdx.x] = true;
}

inline void run(std::function<void()> kernel, int64_t blocks) {
    body = kernel;
    for (int64_t block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        for (int i = 0; i < HOST_THREADS; ++i) {
            done[i] = false, arrived[i] = 0, exchanges[i] = 0;
            getcontext(&contexts[i]);
            contexts[i].uc_stack.ss_sp = &stacks[i * HOST_STACK];
            contexts[i].uc_stack.ss_size = HOST_STACK;
            contexts[i].uc_link = &scheduler;
            makecontext(&contexts[i], start, 0);
        }
        for (bool some = true; some;) {
            some = false;
            for (int i = 0; i < HOST_THREADS; ++i) {
                if (done[i]) continue;
                some = true, threadIdx.x = i;
                swapcontext(&scheduler, &contexts[i]);
            }
        }
    }
}

#define half_value half_value_of_a_gpu
#include "numbers.cuh"
#undef half_value
inline float half_value(u32 bits) {
    const u32 exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float magnitude = exponent ? std::ldexp(1024.0f + mantissa, (int)exponent - 25) : std::ldexp((float)mantissa, -24);
    return bits & 0x8000 ? -magnitude : magnitude;
}
