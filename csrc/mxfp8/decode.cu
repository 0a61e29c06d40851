// MXFP8 as LPQ_OUTPUT: elements of type LPQ_ELEMENT times the power of two of their block, rounded once. How far exponents
// are apart is said of those of lines below each other and of blocks side by side.
#include "decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, fitting<64>) decode_tiles(
    const u8* data, const u8* scale, void* out, i64 down, i64 across, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    uint2 codes[ROWS];
    load_codes(t, data, codes);
    u32 exponents[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (i < t.high && t.wide) exponents[i] = __ldg(scale + (t.row + i) * down + t.col / 32 * across);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (i >= t.high || !t.wide) continue;
        const u32 exponent = exponents[i];
        const float power = __uint_as_float(exponent == 255 ? NAN_BITS : exponent ? exponent << 23 : 0x400000u);
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(decode<LPQ_ELEMENT>(code_of(codes[i], j)), power);
        store_values(out, t.row + i, t.col, cols, v);
    }
}
