// FP8 as LPQ_OUTPUT: elements of type LPQ_ELEMENT times the scale of what they belong to, rounded once.
//
// The scale of element (row, col) is number row / high * stride + col / wide; a size of 0 is the whole dimension.
#include "decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, fitting<64>) decode_tiles(
    const u8* data, const float* scale, void* out, u32 high, u32 wide, i64 stride, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    uint2 codes[ROWS];
    load_codes(t, data, codes);
    const i64 across = wide ? t.col / UNIT : 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (i >= t.high || !t.wide) continue;
        const i64 down = high == 0 ? 0 : high == 1 ? t.row + i : (t.row + i) / UNIT;
        const float s = scale[down * stride + across];
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(decode<LPQ_ELEMENT>(code_of(codes[i], j)), s);
        store_values(out, t.row + i, t.col, cols, v);
    }
}
