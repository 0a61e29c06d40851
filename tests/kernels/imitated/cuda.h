// CUDA on a CPU, as far as csrc uses it: what kernels are compiled with. What runs them, and the instructions that are
// written as PTX, are in cuda.cpp, which is compiled once and not with every kernel.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <utility>

#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static __attribute__((section("lpq_shared")))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

struct uint2 { alignas(8) unsigned x; unsigned y; };
struct uint4 { alignas(16) unsigned x; unsigned y, z, w; };
struct float4 { alignas(16) float x; float y, z, w; };
struct Dim { unsigned x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern Dim threadIdx, blockIdx, blockDim, gridDim;

namespace imitated {

// Shared memory whose size is known at the launch.
constexpr size_t DYNAMIC = 96 << 10;
alignas(128) extern char dynamic[DYNAMIC];

// ------------------------------------------------------------------------------------------ threads

// What a GPU would not do, if anything.
extern const char* wrong;

bool aligned(const void* at, size_t to);

// What some threads wait for each other at: each time all of them have come it opens.
struct Gate {
    int came = 0;
    unsigned times = 0;
};

extern Gate gates[16];
extern int alive;
void arrive(Gate& gate, int wanted);

// What lanes say to each other, the last time and the time before: who is late still reads that.
struct Warp {
    Gate gate;
    uint64_t said[2][32];
};

// What another lane of the warp has; all 32 call it.
Warp& tell(uint64_t mine);
inline uint64_t told(const Warp& warp, int lane) { return warp.said[(warp.gate.times - 1) % 2][lane]; }

// Calls a kernel with packed arguments, whose places are given.
extern char* packed;
extern const int* starts;
template <class... A, size_t... I>
void call(void (*kernel)(A...), std::index_sequence<I...>) { kernel(*(A*)(packed + starts[I])...); }
template <class... A>
void call_packed(void (*kernel)(A...)) { call(kernel, std::index_sequence_for<A...>()); }
template <auto KERNEL>
void invoke() { call_packed(KERNEL); }

// Runs all blocks of a kernel: null, or what is wrong.
const char* launch(void (*invoked)(), char* bytes, const int* places, unsigned blocks, int threads, int shared, int backwards);

// ------------------------------------------------------------------------------------------ numbers

template <class To, class From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace imitated

// ------------------------------------------------------------------------------------------ functions

inline float __uint_as_float(unsigned x) { return imitated::as<float>(x); }
inline unsigned __float_as_uint(float x) { return imitated::as<unsigned>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
float __fadd_rz(float a, float b);
float __fmul_rz(float a, float b);
float __fmaf_rz(float a, float b, float c);
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }

unsigned __byte_perm(unsigned a, unsigned b, unsigned places);
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}

template <class T> inline T __ldg(const T* from) {
    T value;
    imitated::aligned(from, sizeof value);
    memcpy(&value, from, sizeof value);
    return value;
}
template <class T> inline T __ldcs(const T* from) { return __ldg(from); }
template <class T> inline void __stcs(T* to, T value) {
    imitated::aligned(to, sizeof value);
    memcpy(to, &value, sizeof value);
}
template <class T> inline T atomicMax(T* to, T value) { const T old = *to; *to = max(old, value); return old; }
inline size_t __cvta_generic_to_shared(const void* at) { return (const char*)at - imitated::dynamic; }

inline void __syncthreads() { imitated::arrive(imitated::gates[0], imitated::alive); }
inline void __syncwarp() { imitated::tell(0); }
unsigned __shfl_xor_sync(unsigned, unsigned mine, int apart);
inline float __shfl_xor_sync(unsigned all, float mine, int apart) {
    return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(mine), apart));
}
unsigned __reduce_max_sync(unsigned, unsigned mine);
inline bool __any_sync(unsigned all, bool mine) { return __reduce_max_sync(all, mine); }
inline bool __all_sync(unsigned all, bool mine) { return !__reduce_max_sync(all, !mine); }

// ------------------------------------------------------------------------------------------ PTX

namespace imitated {

// An instruction takes and gives bits. It is looked up by its text once for each place where it is written.
using Does = void(uint64_t* out, const uint64_t* in);
Does* instruction(const char* text);

// What an asm statement takes and gives, which is translated to a call of its instruction.
inline uint64_t bits_of(float value) { return as<uint32_t>(value); }
inline uint64_t bits_of(const void* value) { return (uint64_t)value; }
inline uint64_t bits_of(unsigned value) { return value; }
inline uint64_t bits_of(int value) { return (uint64_t)value; }
inline void set(float& to, uint64_t bits) { to = as<float>((uint32_t)bits); }
inline void set(unsigned& to, uint64_t bits) { to = (unsigned)bits; }
inline void set(unsigned short& to, uint64_t bits) { to = (unsigned short)bits; }

}  // namespace imitated
