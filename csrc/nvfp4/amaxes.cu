// NVFP4: the amaxes of a matrix alone, from one read: for each block of threads the largest magnitude in its tiles, and where
// they are wanted the amaxes of all blocks of the operands. A null pointer leaves something out.
//
// LPQ_ROTATED: of the column operand, which is rotated. LPQ_STATS: amaxes of blocks are wanted. LPQ_SQUARE: blocks of 16x16 in
// place of 1x16.
#include "options.cuh"
#include "sides.cuh"

static_assert(halves_are_16_apart<true>, "tiles are too wide");

namespace nvfp4 {

// The amaxes of the blocks that this thread holds a half of, of its columns, as fp32 bits: of rotated ones, and of others.
__device__ __forceinline__ void rotated_amaxes(const u32 (&words)[4], u32 (&amax)[8]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u32 word = larger_pair(words[k], __shfl_xor_sync(~0u, words[k], 16));
        amax[2 * k] = bf16_amax_bits(word & 0xffffu), amax[2 * k + 1] = bf16_amax_bits(word >> 16);
    }
}
__device__ __forceinline__ void plain_amaxes(const u32 (&w)[ROWS][WORDS], u32 (&amax)[8]) {
    u32 words[WORDS];
    col_amax(w, words);
    reduce_lanes<16, 16>(words);
#pragma unroll
    for (int j = 0; j < 8; ++j) amax[j] = amax_bits(value(words, j));
}

// The amaxes of the blocks along a tile's columns, on their way.
struct ColumnAmaxes {
    alignas(16) u32 of[DOWN][WIDE];

    // Put the amaxes of this thread's columns, by one of the two threads that hold a block.
    __device__ __forceinline__ void put(const Tile& t, const u32 (&amax)[8]) {
        if (t.lane_row % 16) return;
        uint4* to = (uint4*)&of[t.lane_row / 16][t.lane_col];
        to[0] = make_uint4(amax[0], amax[1], amax[2], amax[3]), to[1] = make_uint4(amax[4], amax[5], amax[6], amax[7]);
    }

    // After __syncthreads: four blocks of a column by each thread.
    __device__ __forceinline__ void store(const Tile& t, u32* out) const {
        static_assert(THREADS == WIDE * DOWN / 4, "each thread has four");
        const int line = threadIdx.x % WIDE, first = threadIdx.x / WIDE * 4;
        const i64 col = (i64)t.across * WIDE + line, block = (i64)t.down * DOWN + first, blocks = (t.rows + 15) / 16;
        const u32 four[4] = {of[first][line], of[first + 1][line], of[first + 2][line], of[first + 3][line]};
        if (WHOLE || col < t.cols) store_bytes<16>(out + col * blocks, block * 4, blocks * 4, four);
    }
};

// Store the amaxes of the blocks along this thread's rows: it writes half of them, the other thread of the blocks the rest.
__device__ __forceinline__ void store_row_amaxes(const Tile& t, const u32 (&w)[ROWS][WORDS], u32* out) {
    const i64 blocks = (t.cols + 15) / 16;
    u32 words[LINES];
    row_amax(w, words);
    reduce_lanes<1, 1>(words);
    const int half = t.lane_col / 8 % 2 * (ROWS / 2);
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
        const float amax = half ? value(words, i + ROWS / 2) : value(words, i);
        if (WHOLE || (half + i < t.high && t.col / 16 < blocks))
            store_piece(out + (t.row + half + i) * blocks + t.col / 16, amax_bits(amax));
    }
}

// Store the amax of the 16x16 elements of which this thread holds a quarter, in the order of one operand, at `line` and `at`.
__device__ __forceinline__ void store_square_amax(const Tile& t, u32 amax, i64 line, i64 at, i64 lines, i64 blocks, u32* out) {
    amax = max(amax, __shfl_xor_sync(~0u, amax, 1)), amax = max(amax, __shfl_xor_sync(~0u, amax, 16));
    if (t.lane_row % 16 == 0 && t.lane_col % 16 == 0 && line < lines && at < blocks) out[line * blocks + at] = amax;
}

}  // namespace nvfp4

extern "C" __global__ void __launch_bounds__(THREADS, fitting<LPQ_INPUT == LPQ_FP32 ? 255 : REGISTERS>) amaxes(
    const void* x, u32* plain, u32* rotated, u32* of_rows, u32* of_cols, u32 count, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    u32 in_plain = 0, in_rotated = 0;
    const i64 across = (cols + 15) / 16, down = (rows + 15) / 16;
    __shared__ Ahead<> ahead;
    __shared__ nvfp4::ColumnAmaxes columns;
    ahead.fetch(Tile(rows, cols, blockIdx.x), x);
    for (u32 at = blockIdx.x; at < count; at += gridDim.x) {
        const Tile t(rows, cols, at);
        u32 w[ROWS][WORDS], y[8][4], words[4], of_col[8], of_tile = 0;
        ahead.take(t, x, w);
        if (at + gridDim.x < count) ahead.fetch(Tile(rows, cols, at + gridDim.x), x);
        if (plain) in_plain = max(in_plain, of_tile = thread_amax(w));
        if (STATS && of_rows) {
            if (SQUARE)
                nvfp4::store_square_amax(t, of_tile, t.row / 16, t.col / 16, down, across, of_rows);
            else
                nvfp4::store_row_amaxes(t, w, of_rows);
        }
        if (ROTATED) {
            rotate(t, w, y);
            rotated_amax(y, words);
            const u32 most = larger_pair(larger_pair(words[0], words[1]), larger_pair(words[2], words[3]));
            of_tile = bf16_amax_bits(max(most & 0xffffu, most >> 16));
            in_rotated = max(in_rotated, of_tile);
        }
        if (!STATS || !of_cols) continue;
        if (SQUARE) {
            nvfp4::store_square_amax(t, of_tile, t.col / 16, t.row / 16, across, down, of_cols);
            continue;
        }
        if (ROTATED)
            nvfp4::rotated_amaxes(words, of_col);
        else
            nvfp4::plain_amaxes(w, of_col);
        __syncthreads();  // amaxes of the tile before are on their way out
        columns.put(t, of_col);
        __syncthreads();
        columns.store(t, of_cols);
    }
    __shared__ Largest of_plain, of_rotated;
    if (plain) {
        in_plain = block_max(in_plain, of_plain);
        if (threadIdx.x == 0) plain[blockIdx.x] = in_plain;
    }
    if (!ROTATED) return;
    in_rotated = block_max(in_rotated, of_rotated);
    if (threadIdx.x == 0) rotated[blockIdx.x] = in_rotated;
}
