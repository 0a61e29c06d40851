// FP8 as LPQ_OUTPUT: elements of type LPQ_ELEMENT times the scale of what they belong to, rounded once.
//
// The scale of element (row, col) is number row / high * down + col / wide * across; a size of 0 is the whole dimension.
#include "decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, fitting<64>) decode_tiles(
    const u8* data, const float* scale, void* out, u32 high, u32 wide, i64 down, i64 across, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    uint2 codes[ROWS];
    load_codes(t, data, codes);
    const i64 in_line = wide ? t.col / UNIT * across : 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (i >= t.high || !t.wide) continue;
        const i64 line = high == 0 ? 0 : high == 1 ? t.row + i : (t.row + i) / UNIT;
        const float s = scale[line * down + in_line];
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(decode<LPQ_ELEMENT>(code_of(codes[i], j)), s);
        store_values(out, t.row + i, t.col, cols, v);
    }
}
