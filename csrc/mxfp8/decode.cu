// MXFP8 as LPQ_OUTPUT: what codes of type LPQ_ELEMENT stand for, rounded once.
#include "codes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, fitting<64>) decode_tiles(
    const u8* data, const u8* scale, void* out, i64 down, i64 across, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    const mxfp8::Codes<LPQ_ELEMENT> codes = {data, scale, down, across};
    codes.each_line(t, [&](int i, const float(&v)[8]) { store_values(out, t.row + i, t.col, cols, v); });
}
