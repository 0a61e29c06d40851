// CUDA on a CPU, as far as csrc uses it: a block of threads as fibers that take turns, what they share, what they wait for,
// and the instructions that are written as PTX. Blocks run one after the other.
#pragma once
#include <ucontext.h>

#include <fenv.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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

static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace imitated {

alignas(128) static char dynamic[96 << 10];
extern "C" char __start_lpq_shared[] __attribute__((weak)), __stop_lpq_shared[] __attribute__((weak));

// ------------------------------------------------------------------------------------------ threads

constexpr int THREADS = 1024, STACK = 128 << 10;

// What a GPU would not do, if anything.
static const char* wrong;

inline bool aligned(const void* at, size_t to) {
    if ((uintptr_t)at % to == 0) return true;
    wrong = "a piece is read or written that is not aligned";
    return false;
}

// What some threads wait for each other at: each time all of them have come it opens.
struct Gate {
    int came = 0;
    unsigned times = 0;
};

struct Fiber {
    ucontext_t context;
    const unsigned* waits_for = nullptr;  // until this is no longer `seen`
    unsigned seen = 0;
    bool done = false;
    struct Copy { char* to; const void* from; } copies[16];  // of 16 bytes each, on their way to shared memory
    int copying = 0;
};

// What lanes say to each other, the last time and the time before: who is late still reads that.
struct Warp {
    Gate gate;
    uint64_t said[2][32];
};

static Fiber fibers[THREADS];
static Warp warps[THREADS / 32];
static Gate gates[16];
static char* stacks;
static int alive;
static ucontext_t scheduler;
static void (*body)();

inline Fiber& self() { return fibers[threadIdx.x]; }

inline void arrive(Gate& gate, int wanted) {
    if (++gate.came == wanted) {
        gate.came = 0, ++gate.times;
        return;
    }
    Fiber& fiber = self();
    fiber.waits_for = &gate.times, fiber.seen = gate.times;
    swapcontext(&fiber.context, &scheduler);
}

inline void start() {
    body();
    self().done = true, --alive;
    swapcontext(&self().context, &scheduler);
}

// All threads of a warp as far as they come without the others.
inline bool run_warp(int first, bool backwards) {
    bool moved = false;
    for (bool again = true; again;) {
        again = false;
        for (int i = 0; i < 32; ++i) {
            const int thread = first + (backwards ? 31 - i : i);
            Fiber& fiber = fibers[thread];
            if (thread >= (int)blockDim.x || fiber.done || (fiber.waits_for && *fiber.waits_for == fiber.seen)) continue;
            threadIdx.x = thread, fiber.waits_for = nullptr, moved = again = true;
            swapcontext(&scheduler, &fiber.context);
        }
    }
    return moved;
}

// A block: warps take turns where they wait, the first of them first or the last.
inline void run_block(int threads, bool backwards) {
    for (char* at = __start_lpq_shared; at < __stop_lpq_shared; ++at) *at = (char)0xa5;
    memset(dynamic, 0xa5, sizeof dynamic);
    for (Warp& warp : warps) warp.gate = Gate();
    for (Gate& gate : gates) gate = Gate();
    if (!stacks) stacks = (char*)mmap(0, (size_t)THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    alive = threads;
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.done = false, fiber.waits_for = nullptr, fiber.copying = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + (size_t)i * STACK, fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, start, 0);
    }
    const int count = (threads + 31) / 32;
    for (bool moved = true; alive && moved;) {
        moved = false;
        for (int i = 0; i < count; ++i) moved |= run_warp(32 * (backwards ? count - 1 - i : i), backwards);
    }
    if (alive) wrong = "threads wait for others for ever";
}

// What another lane of the warp has; all 32 call it.
inline Warp& tell(uint64_t mine) {
    Warp& warp = warps[threadIdx.x / 32];
    warp.said[warp.gate.times % 2][threadIdx.x % 32] = mine;
    arrive(warp.gate, 32);
    return warp;
}
inline uint64_t told(const Warp& warp, int lane) { return warp.said[(warp.gate.times - 1) % 2][lane]; }

// Calls a kernel with packed arguments, whose places are given.
template <class... A, size_t... I>
void call(void (*kernel)(A...), char* bytes, const int* places, std::index_sequence<I...>) {
    kernel(*(A*)(bytes + places[I])...);
}
static char* packed;
static const int* starts;

template <auto KERNEL, class... A>
void call_packed(void (*)(A...)) { call<A...>(KERNEL, packed, starts, std::index_sequence_for<A...>()); }
template <auto KERNEL>
void invoke() { call_packed<KERNEL>(KERNEL); }

// Null, or what is wrong.
template <auto KERNEL>
const char* launch(char* bytes, const int* places, unsigned blocks, int threads, int shared, int backwards) {
    wrong = nullptr;
    packed = bytes, starts = places, body = invoke<KERNEL>;
    gridDim = {blocks, 1, 1}, blockDim = {(unsigned)threads, 1, 1};
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx = {backwards ? blocks - 1 - block : block, 0, 0};
        run_block(threads, backwards);
        for (size_t i = shared; i < sizeof dynamic; ++i)
            if (dynamic[i] != (char)0xa5) wrong = "more shared memory is written than was asked for";
        if (wrong) return wrong;
    }
    return nullptr;
}

// ------------------------------------------------------------------------------------------ numbers

template <class To, class From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// An fp32 as a smaller float: to the nearest even, or towards zero. Above the largest: that, or `beyond`.
inline uint32_t narrow(float x, int mantissa, int bias, uint32_t largest, uint32_t beyond, uint32_t nan, int bits, bool cut = false) {
    const uint32_t sign = as<uint32_t>(x) >> 31 << (bits - 1);
    if (isnan(x)) return nan;
    if (isinf(x)) return sign | beyond;
    int exponent;
    frexp(x, &exponent);
    const int e = x == 0 || exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
    const double count = ldexp(fabs((double)x), mantissa - e);
    const uint32_t code = (uint32_t)(cut ? floor(count) : nearbyint(count)) + ((uint32_t)(e + bias - 1) << mantissa);
    return sign | (code <= largest ? code : cut ? largest : beyond);
}
inline uint32_t to_bf16(float x) { return narrow(x, 7, 127, 0x7f7f, 0x7f80, 0x7fff, 16); }
inline uint32_t to_fp16(float x, bool cut = false) { return narrow(x, 10, 15, 0x7bff, 0x7c00, 0x7fff, 16, cut); }
inline uint32_t to_e4m3(float x) { return narrow(x, 3, 7, 0x7e, 0x7e, 0x7f, 8); }
inline uint32_t to_e5m2(float x) { return narrow(x, 2, 15, 0x7b, 0x7b, 0x7f, 8); }
inline float from_bf16(uint32_t bits) { return as<float>(bits << 16); }
inline float from_fp16(uint32_t bits) { return (float)as<_Float16>((uint16_t)bits); }
inline uint32_t e4m3_as_fp16(uint32_t code) {
    if ((code & 0x7f) == 0x7f) return 0x7fff;
    return to_fp16(from_fp16((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0f);
}

// The larger magnitude, with the signs' difference as its sign.
inline uint32_t larger(uint32_t a, uint32_t b, uint32_t infinity) {
    const uint32_t p = a & 0x7fff, q = b & 0x7fff;
    return p > infinity || q > infinity ? 0x7fff : (p > q ? p : q) | ((a ^ b) & 0x8000);
}

template <class F>
inline uint32_t halves(uint32_t a, uint32_t b, F f) { return (f(a & 0xffff, b & 0xffff) & 0xffff) | f(a >> 16, b >> 16) << 16; }

template <class F>
inline float towards_zero(F f) {
    fesetround(FE_TOWARDZERO);
    const volatile float result = f();
    fesetround(FE_TONEAREST);
    return result;
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
inline float __fadd_rz(float a, float b) { volatile float p = a, q = b; return imitated::towards_zero([&] { return p + q; }); }
inline float __fmul_rz(float a, float b) { volatile float p = a, q = b; return imitated::towards_zero([&] { return p * q; }); }
inline float __fmaf_rz(float a, float b, float c) {
    volatile float p = a, q = b, r = c;
    return imitated::towards_zero([&] { return fmaf(p, q, r); });
}
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned places) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (unsigned)(both >> (8 * (places >> (4 * i) & 7)) & 0xff) << (8 * i);
    return out;
}
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
inline unsigned __shfl_xor_sync(unsigned, unsigned mine, int apart) {
    return (unsigned)imitated::told(imitated::tell(mine), (threadIdx.x % 32) ^ apart);
}
inline float __shfl_xor_sync(unsigned all, float mine, int apart) {
    return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(mine), apart));
}
inline unsigned __reduce_max_sync(unsigned, unsigned mine) {
    const imitated::Warp& warp = imitated::tell(mine);
    unsigned most = 0;
    for (int lane = 0; lane < 32; ++lane) most = max(most, (unsigned)imitated::told(warp, lane));
    return most;
}
inline bool __any_sync(unsigned all, bool mine) { return __reduce_max_sync(all, mine); }
inline bool __all_sync(unsigned all, bool mine) { return !__reduce_max_sync(all, !mine); }

// ------------------------------------------------------------------------------------------ PTX

namespace imitated {

inline bool has(const char* text, const char* part) { return strstr(text, part) != nullptr; }

// An instruction: what goes in and what comes out, as bits.
inline void run(const char* text, uint64_t* out, const uint64_t* in) {
    const auto number = [&](int i) { return as<float>((uint32_t)in[i]); };
    const auto is = [&](const char* name) { return strncmp(text, name, strlen(name)) == 0; };
    const uint32_t a = (uint32_t)in[0], b = (uint32_t)in[1], c = (uint32_t)in[2];
    if (is("griddepcontrol")) return;
    if (is("cp.async.wait_all")) {
        Fiber& fiber = self();
        for (int i = 0; i < fiber.copying; ++i) memcpy(fiber.copies[i].to, fiber.copies[i].from, 16);
        fiber.copying = 0;
    } else if (is("cvt.rn.bf16x2.f32")) out[0] = to_bf16(number(has(text, "%1, %1") ? 0 : 1)) | to_bf16(number(0)) << 16;
    else if (is("cvt.rn.f16x2.f32")) out[0] = to_fp16(number(1)) | to_fp16(number(0)) << 16;
    else if (is("cvt.rz.f16x2.f32")) out[0] = to_fp16(number(1), true) | to_fp16(number(0), true) << 16;
    else if (is("cvt.rn.satfinite.e4m3x2.f32")) out[0] = to_e4m3(number(1)) | to_e4m3(number(0)) << 8;
    else if (is("cvt.rn.satfinite.e5m2x2.f32")) out[0] = to_e5m2(number(1)) | to_e5m2(number(0)) << 8;
    else if (has(text, "cvt.f32.f16")) out[0] = as<uint32_t>(from_fp16(a));
    else if (has(text, "cvt.rn.f16x2.e4m3x2")) {
        out[0] = e4m3_as_fp16(a & 0xff) | e4m3_as_fp16(a >> 8 & 0xff) << 16;
        out[1] = e4m3_as_fp16(a >> 16 & 0xff) | e4m3_as_fp16(a >> 24) << 16;
    } else if (has(text, "cvt.rn.f16x2.e5m2x2")) {
        out[0] = (a & 0xff) << 8 | (a & 0xff00) << 16;
        out[1] = (a >> 16 & 0xff) << 8 | (a >> 16 & 0xff00) << 16;
    } else if (is("fma.rn.bf16x2") && (c & 0x7fff7fff) == 0)  // a product, which fp32 holds
        out[0] = to_bf16(fma(from_bf16(a & 0xffff), from_bf16(b & 0xffff), from_bf16(c & 0xffff))) |
                 to_bf16(fma(from_bf16(a >> 16), from_bf16(b >> 16), from_bf16(c >> 16))) << 16;
    else if (is("max.u16x2")) out[0] = halves(a, b, [](uint32_t p, uint32_t q) { return max(p, q); });
    else if (is("min.u16x2")) out[0] = halves(a, b, [](uint32_t p, uint32_t q) { return min(p, q); });
    else if (is("max.NaN.xorsign.abs.bf16x2")) out[0] = halves(a, b, [](uint32_t p, uint32_t q) { return larger(p, q, 0x7f80); });
    else if (is("max.NaN.xorsign.abs.f16x2")) out[0] = halves(a, b, [](uint32_t p, uint32_t q) { return larger(p, q, 0x7c00); });
    else if (is("lop3.b32") && has(text, "0xca")) out[0] = (a & b) | (~a & c);
    else if (is("ld.global.nc")) {
        const uint4 v = __ldg((const uint4*)in[0]);
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else if (has(text, "cache_hint.u32")) __stcs((unsigned*)in[0], b);
    else if (has(text, "cache_hint.v2.u32")) __stcs((uint2*)in[0], make_uint2(b, c));
    else if (has(text, "cache_hint.v4.u32")) __stcs((uint4*)in[0], make_uint4(b, c, (uint32_t)in[3], (uint32_t)in[4]));
    else if (is("cp.async.cg.shared.global")) {
        Fiber& fiber = self();
        char* to = dynamic + (int32_t)in[0];
        if (aligned(to, 16) && aligned((const void*)in[1], 16)) fiber.copies[fiber.copying++ % 16] = {to, (const void*)in[1]};
        if (fiber.copying > 16) wrong = "more copies are on their way than are imitated";
    } else if (is("bar.sync")) arrive(gates[in[0]], (int)in[1]);
    else {
        fprintf(stderr, "tests/kernels/imitated/cuda.h does not know the instruction %s\n", text);
        abort();
    }
}

// What an asm statement takes and gives, which is translated to a call of ``run``.
inline uint64_t bits_of(float value) { return as<uint32_t>(value); }
inline uint64_t bits_of(const void* value) { return (uint64_t)value; }
inline uint64_t bits_of(unsigned value) { return value; }
inline uint64_t bits_of(int value) { return (uint64_t)value; }
inline void set(float& to, uint64_t bits) { to = as<float>((uint32_t)bits); }
inline void set(unsigned& to, uint64_t bits) { to = (unsigned)bits; }
inline void set(unsigned short& to, uint64_t bits) { to = (unsigned short)bits; }

}  // namespace imitated
