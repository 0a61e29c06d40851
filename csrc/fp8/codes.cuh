// What FP8's codes stand for: elements times the scale of what they belong to.
//
// The scale of element (row, col) is number row / high * down + col / wide * across; a size of 0 is the whole dimension.
#pragma once
#include "decode.cuh"

namespace fp8 {

template <class F>
struct Codes {
    const u8* data;
    const float* scale;
    i64 high, wide, down, across;

    // Calls `use(i, v)` with this thread's eight values of each line that lies in the matrix.
    template <class Use>
    __device__ __forceinline__ void each_line(const Tile& t, const Use& use) const {
        uint2 codes[ROWS];
        load_codes(t, data, codes);
        const i64 in_line = wide ? t.col / UNIT * across : 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (i >= t.high || !t.wide) continue;
            const i64 line = high == 0 ? 0 : high == 1 ? t.row + i : (t.row + i) / UNIT;
            const float s = scale[line * down + in_line];
            float v[8];
            decode_line<F>(codes[i], s, v);
            use(i, v);
        }
    }
};

}  // namespace fp8
