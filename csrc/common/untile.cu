// Scales, which a kernel has written tile by tile, in the order in which they belong.
//
// For each tile of 128 x 128 there are 128 words for its rows, then 128 for its columns: a word holds what belongs to a
// line of the tile. Where a kernel writes such words to their places itself, each costs a request to memory of its own.
#include "tile.cuh"

constexpr int SIDE_BY_SIDE = 32;

// row_out[128 down, across], col_out[128 across, down], in words; null leaves one out. A block of threads takes the words
// of 32 tiles.
extern "C" __global__ void __launch_bounds__(THREADS) untile(
    const u32* words, u32* row_out, u32* col_out, u32 down, u32 across
) {
    wait_for_the_one_before();
    __shared__ u32 lines[UNIT][SIDE_BY_SIDE + 1];
    const u32 in_a_row = (across + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
    const u32 in_a_col = (down + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
    const u32 for_rows = row_out ? down * in_a_row : 0;
    const bool of_rows = blockIdx.x < for_rows;
    const u32 index = of_rows ? blockIdx.x : blockIdx.x - for_rows, groups = of_rows ? in_a_row : in_a_col;
    const u32 line = index / groups, first = index % groups * SIDE_BY_SIDE, count = of_rows ? across : down;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 tile = of_rows ? (i64)line * across + first : (i64)first * across + line, step = of_rows ? 1 : across;
    const u32* from = words + tile * (2 * UNIT) + (of_rows ? 0 : UNIT);
#pragma unroll
    for (int k = warp; k < SIDE_BY_SIDE; k += THREADS / 32)
#pragma unroll
        for (int i = lane; i < UNIT; i += 32)
            if (first + k < count) lines[i][k] = from[k * step * (2 * UNIT) + i];
    __syncthreads();
    u32* to = (of_rows ? row_out : col_out) + (i64)line * UNIT * count + first;
    if (first + lane < count)
#pragma unroll
        for (int i = warp; i < UNIT; i += THREADS / 32) to[(i64)i * count + lane] = lines[i][lane];
}
