// What MXFP8's codes stand for: elements times the power of two of their block. How far exponents are apart is said of the
// exponents of lines below each other and of blocks side by side.
#pragma once
#include "decode.cuh"
#include "e8m0.cuh"

namespace mxfp8 {

template <class F>
struct Codes {
    const u8 *data, *scale;
    i64 down, across;

    // Calls `use(i, v)` with this thread's eight values of each line that lies in the matrix.
    template <class Use>
    __device__ __forceinline__ void each_line(const Tile& t, const Use& use) const {
        uint2 codes[ROWS];
        load_codes(t, data, codes);
        u32 exponents[ROWS] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (i < t.high && t.wide) exponents[i] = __ldg(scale + (t.row + i) * down + t.col / 32 * across);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (i >= t.high || !t.wide) continue;
            const float power = power_of_exponent(exponents[i]);
            float v[8];
            decode_line<F>(codes[i], power, v);
            use(i, v);
        }
    }
};

}  // namespace mxfp8
