// What MXFP4's codes stand for, in the basis in which they are stored: elements times the power of two of their block. How far
// exponents are apart is said of the exponents of lines below each other and of blocks side by side.
#pragma once
#include "decode.cuh"
#include "e2m1.cuh"
#include "e8m0.cuh"

namespace mxfp4 {

struct Codes {
    const u8 *data, *scale;
    i64 down, across;

    // Calls `use(i, v)` with this thread's eight values of each line that lies in the matrix; EVERY: padding of a block
    // included, and of each line, so that all threads call it.
    template <bool EVERY = false, class Use>
    __device__ __forceinline__ void each_line(const Tile& t, const Use& use) const {
        const i64 blocks = (t.cols + 31) / 32;
        const bool stored = WHOLE || (EVERY ? t.col / 32 < blocks : t.wide > 0);
        u32 codes[ROWS] = {}, exponents[ROWS] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (i >= t.high || !stored) continue;
            codes[i] = __ldcs((const u32*)(data + (t.row + i) * blocks * 16 + t.col / 2));
            exponents[i] = __ldg(scale + (t.row + i) * down + t.col / 32 * across);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (!EVERY && (i >= t.high || !stored)) continue;
            const float power = power_of_exponent(exponents[i]);
            float v[8];
            decode_e2m1(codes[i], v);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j] * 16384.0f, power);
            use(i, v);
        }
    }
};

}  // namespace mxfp4
