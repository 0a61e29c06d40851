// MXFP4 as LPQ_OUTPUT, rounded once, in the basis in which it is stored, or with LPQ_ROTATED with the random Hadamard
// transform undone.
#include "codes.cuh"
#include "rotation.cuh"

#ifdef LPQ_ROTATED
constexpr bool ROTATED = true;
#else
constexpr bool ROTATED = false;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, fitting<64>) decode_tiles(
    const u8* data, const u8* scale, void* out, i64 down, i64 across, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    const mxfp4::Codes codes = {data, scale, down, across};
    codes.each_line<ROTATED>(t, [&](int i, float(&v)[8]) {
        if (ROTATED) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j], 0.25f);
            unrotate(threadIdx.x & 1, v);
        }
        if (i < t.high) store_values(out, t.row + i, t.col, cols, v);
    });
}
