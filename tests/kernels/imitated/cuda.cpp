// CUDA on a CPU: a block of threads as fibers that take turns, what they share, what they wait for, and the instructions
// that are written as PTX. Blocks run one after the other.
#include "cuda.h"

#include <fenv.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

Dim threadIdx, blockIdx, blockDim, gridDim;

namespace imitated {

char dynamic[DYNAMIC];
extern "C" char __start_lpq_shared[] __attribute__((weak)), __stop_lpq_shared[] __attribute__((weak));

// ------------------------------------------------------------------------------------------ threads

constexpr int THREADS = 1024, STACK = 128 << 10, COPIES = 24;
constexpr char UNWRITTEN = (char)0xa5;

const char* wrong;

bool aligned(const void* at, size_t to) {
    if ((uintptr_t)at % to == 0) return true;
    wrong = "a piece is read or written that is not aligned";
    return false;
}

// Where a fiber, or what runs them, goes on. To go there calls nothing of the system, as a ucontext_t does each time.
struct Place {
    jmp_buf at;
};
inline void go(Place& from, Place& to) {
    if (!_setjmp(from.at)) _longjmp(to.at, 1);
}

struct Fiber {
    Place place;
    bool there = false;  // it was started, and begins anew in the next block
    const unsigned* waits_for = nullptr;  // until this is no longer `seen`
    unsigned seen = 0;
    bool done = false;
    struct Copy { char* to; const void* from; } copies[COPIES];  // of 16 bytes each, on their way to shared memory
    int copying = 0;
};

static Fiber fibers[THREADS];
static Warp warps[THREADS / 32];
Gate gates[16];
static char *stacks, clean[DYNAMIC];
int alive;
static Place scheduler;
static void (*body)();
char* packed;
const int* starts;

inline Fiber& self() { return fibers[threadIdx.x]; }

void arrive(Gate& gate, int wanted) {
    if (++gate.came == wanted) {
        gate.came = 0, ++gate.times;
        return;
    }
    Fiber& fiber = self();
    fiber.waits_for = &gate.times, fiber.seen = gate.times;
    go(fiber.place, scheduler);
}

static void live() {
    for (;;) {
        body();
        Fiber& fiber = self();
        fiber.done = true, --alive;
        go(fiber.place, scheduler);
    }
}

// Gives a fiber a stack.
static void start(Fiber& fiber) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + (&fiber - fibers) * STACK, context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, live, 0);
    fiber.there = true;
    if (!_setjmp(scheduler.at)) setcontext(&context);
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
            if (fiber.there) go(scheduler, fiber.place);
            else start(fiber);
        }
    }
    return moved;
}

// A block: warps take turns where they wait, the first of them first or the last. No thread of the one before is left.
static void run_block(int threads, bool backwards) {
    memset(__start_lpq_shared, UNWRITTEN, __stop_lpq_shared - __start_lpq_shared);
    memset(dynamic, UNWRITTEN, DYNAMIC);
    for (Warp& warp : warps) warp.gate = Gate();
    for (Gate& gate : gates) gate = Gate();
    alive = threads;
    for (int i = 0; i < threads; ++i) fibers[i].done = false, fibers[i].waits_for = nullptr, fibers[i].copying = 0;
    const int count = (threads + 31) / 32;
    for (bool moved = true; alive && moved;) {
        moved = false;
        for (int i = 0; i < count; ++i) moved |= run_warp(32 * (backwards ? count - 1 - i : i), backwards);
    }
    if (alive) wrong = "threads wait for others for ever";
}

Warp& tell(uint64_t mine) {
    Warp& warp = warps[threadIdx.x / 32];
    warp.said[warp.gate.times % 2][threadIdx.x % 32] = mine;
    arrive(warp.gate, 32);
    return warp;
}

const char* launch(void (*invoked)(), char* bytes, const int* places, unsigned blocks, int threads, int shared, int backwards) {
    if (!stacks) {
        stacks = (char*)mmap(0, (size_t)THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(clean, UNWRITTEN, DYNAMIC);
    }
    for (Fiber& fiber : fibers) fiber.there &= !wrong;  // what was left waiting is not gone on with
    wrong = nullptr;
    packed = bytes, starts = places, body = invoked;
    gridDim = {blocks, 1, 1}, blockDim = {(unsigned)threads, 1, 1};
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx = {backwards ? blocks - 1 - block : block, 0, 0};
        run_block(threads, backwards);
        if (memcmp(dynamic + shared, clean, DYNAMIC - shared)) wrong = "more shared memory is written than was asked for";
        if (wrong) return wrong;
    }
    return nullptr;
}

// ------------------------------------------------------------------------------------------ numbers

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

float __fadd_rz(float a, float b) { volatile float p = a, q = b; return imitated::towards_zero([&] { return p + q; }); }
float __fmul_rz(float a, float b) { volatile float p = a, q = b; return imitated::towards_zero([&] { return p * q; }); }
float __fmaf_rz(float a, float b, float c) {
    volatile float p = a, q = b, r = c;
    return imitated::towards_zero([&] { return fmaf(p, q, r); });
}
unsigned __byte_perm(unsigned a, unsigned b, unsigned places) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (unsigned)(both >> (8 * (places >> (4 * i) & 7)) & 0xff) << (8 * i);
    return out;
}

unsigned __shfl_xor_sync(unsigned, unsigned mine, int apart) {
    return (unsigned)imitated::told(imitated::tell(mine), (threadIdx.x % 32) ^ apart);
}
unsigned __reduce_max_sync(unsigned, unsigned mine) {
    const imitated::Warp& warp = imitated::tell(mine);
    unsigned most = 0;
    for (int lane = 0; lane < 32; ++lane) most = max(most, (unsigned)imitated::told(warp, lane));
    return most;
}

// ------------------------------------------------------------------------------------------ PTX

namespace imitated {

// What an instruction does with what goes in, and what comes out, as bits.
#define DOES [](uint64_t* out, const uint64_t* in)
#define NUMBER(i) as<float>((uint32_t)in[i])
#define A (uint32_t)in[0]
#define B (uint32_t)in[1]
#define C (uint32_t)in[2]

// Instructions by how their text begins or, after a *, by what it has in it; the first that fits.
static const struct { const char* text; Does* does; } instructions[] = {
    {"griddepcontrol", DOES {}},
    {"cp.async.wait_all", DOES {
        Fiber& fiber = self();
        for (int i = 0; i < fiber.copying; ++i) memcpy(fiber.copies[i].to, fiber.copies[i].from, 16);
        fiber.copying = 0;
    }},
    {"cvt.rn.bf16x2.f32 %0, %1, %1", DOES { out[0] = to_bf16(NUMBER(0)) * 0x10001; }},
    {"cvt.rn.bf16x2.f32", DOES { out[0] = to_bf16(NUMBER(1)) | to_bf16(NUMBER(0)) << 16; }},
    {"cvt.rn.f16x2.f32", DOES { out[0] = to_fp16(NUMBER(1)) | to_fp16(NUMBER(0)) << 16; }},
    {"cvt.rz.f16x2.f32", DOES { out[0] = to_fp16(NUMBER(1), true) | to_fp16(NUMBER(0), true) << 16; }},
    {"cvt.rn.satfinite.e4m3x2.f32", DOES { out[0] = to_e4m3(NUMBER(1)) | to_e4m3(NUMBER(0)) << 8; }},
    {"cvt.rn.satfinite.e5m2x2.f32", DOES { out[0] = to_e5m2(NUMBER(1)) | to_e5m2(NUMBER(0)) << 8; }},
    {"*cvt.f32.f16", DOES { out[0] = as<uint32_t>(from_fp16(A)); }},
    {"*cvt.rn.f16x2.e4m3x2", DOES {
        out[0] = e4m3_as_fp16(A & 0xff) | e4m3_as_fp16(A >> 8 & 0xff) << 16;
        out[1] = e4m3_as_fp16(A >> 16 & 0xff) | e4m3_as_fp16(A >> 24) << 16;
    }},
    {"*cvt.rn.f16x2.e5m2x2", DOES {
        out[0] = (A & 0xff) << 8 | (A & 0xff00) << 16;
        out[1] = (A >> 16 & 0xff) << 8 | (A >> 16 & 0xff00) << 16;
    }},
    {"rcp.approx.ftz.f32", DOES { out[0] = as<uint32_t>(1.0f / NUMBER(0)); }},  // of numbers whose reciprocal is normal
    {"ex2.approx.ftz.f32", DOES { out[0] = as<uint32_t>(exp2f(NUMBER(0))); }},
    {"fma.rn.bf16x2", DOES {  // a product, which fp32 holds
        if (C & 0x7fff7fff) wrong = "a sum is added to a product in bf16, which is not imitated";
        out[0] = to_bf16(fma(from_bf16(A & 0xffff), from_bf16(B & 0xffff), from_bf16(C & 0xffff))) |
                 to_bf16(fma(from_bf16(A >> 16), from_bf16(B >> 16), from_bf16(C >> 16))) << 16;
    }},
    {"max.u16x2", DOES { out[0] = halves(A, B, [](uint32_t p, uint32_t q) { return max(p, q); }); }},
    {"min.u16x2", DOES { out[0] = halves(A, B, [](uint32_t p, uint32_t q) { return min(p, q); }); }},
    {"max.NaN.xorsign.abs.bf16x2", DOES { out[0] = halves(A, B, [](uint32_t p, uint32_t q) { return larger(p, q, 0x7f80); }); }},
    {"max.NaN.xorsign.abs.f16x2", DOES { out[0] = halves(A, B, [](uint32_t p, uint32_t q) { return larger(p, q, 0x7c00); }); }},
    {"lop3.b32 %0, %1, %2, %3, 0xca", DOES { out[0] = (A & B) | (~A & C); }},
    {"ld.global.nc", DOES {
        const uint4 v = __ldg((const uint4*)in[0]);
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    }},
    {"*cache_hint.u32", DOES { __stcs((unsigned*)in[0], B); }},
    {"*cache_hint.v2.u32", DOES { __stcs((uint2*)in[0], make_uint2(B, C)); }},
    {"*cache_hint.v4.u32", DOES { __stcs((uint4*)in[0], make_uint4(B, C, (uint32_t)in[3], (uint32_t)in[4])); }},
    {"cp.async.cg.shared.global", DOES {
        Fiber& fiber = self();
        char* to = dynamic + (int32_t)in[0];
        if (aligned(to, 16) && aligned((const void*)in[1], 16)) fiber.copies[fiber.copying++ % COPIES] = {to, (const void*)in[1]};
        if (fiber.copying > COPIES) wrong = "more copies are on their way than are imitated";
    }},
    {"bar.sync", DOES { arrive(gates[in[0]], (int)in[1]); }},
};

Does* instruction(const char* text) {
    for (const auto& one : instructions)
        if (*one.text == '*' ? strstr(text, one.text + 1) != nullptr : strncmp(text, one.text, strlen(one.text)) == 0)
            return one.does;
    fprintf(stderr, "tests/kernels/imitated/cuda.cpp does not know the instruction %s\n", text);
    abort();
}

}  // namespace imitated
