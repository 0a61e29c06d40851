// Scales, which a kernel has written unit by unit, in the order in which they belong.
//
// For each of the 128 lines of a unit, which is 128 x 128, there are one or two words. Where a kernel writes such words to
// their places itself, each costs a request to memory of its own.
#include "tile.cuh"

constexpr int ABREAST_WORDS = 32;  // of a line

// For row_out[128 down, across] and col_out[128 across, down], of row_size and col_size words, 1 or 2; null leaves one out.
// A block of threads brings a segment of 32 words of 128 lines to its place.
extern "C" __global__ void __launch_bounds__(THREADS) untile(
    const u32* row_words, const u32* col_words, u32* row_out, u32* col_out, u32 row_size, u32 col_size, u32 down,
    u32 across
) {
    wait_for_the_one_before();
    __shared__ u32 lines[UNIT][ABREAST_WORDS + 1];
    const u32 segments_of_row = (across * row_size + ABREAST_WORDS - 1) / ABREAST_WORDS;
    const u32 segments_of_col = (down * col_size + ABREAST_WORDS - 1) / ABREAST_WORDS;
    const u32 for_rows = row_out ? down * segments_of_row : 0;
    const bool of_rows = blockIdx.x < for_rows;
    const u32 index = of_rows ? blockIdx.x : blockIdx.x - for_rows, segments = of_rows ? segments_of_row : segments_of_col;
    const u32 line = index / segments, first = index % segments * ABREAST_WORDS;
    const u32 two = (of_rows ? row_size : col_size) - 1;  // 1 or 0: how far to shift by the size
    const u32 count = (of_rows ? across : down) << two;   // words of a line
    const i64 unit = of_rows ? (i64)line * across + (first >> two) : (i64)(first >> two) * across + line;
    const i64 step = (of_rows ? 1 : across) * (UNIT << two);
    const u32* from = (of_rows ? row_words : col_words) + unit * (UNIT << two);
    constexpr int EACH = ABREAST_WORDS * UNIT / 4 / THREADS;  // pieces of 16 bytes of a thread, one after another in a unit
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 piece = threadIdx.x + k * THREADS, u = piece / (UNIT / 4) >> two;
        const u32 at = (piece - u * (UNIT / 4 << two)) * 4;
        if (first + (u << two) >= count) continue;
        const uint4 v = *(const uint4*)(from + u * step + at);
        const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) lines[(at + i) >> two][(u << two) + (at + i & two)] = word[i];
    }
    __syncthreads();
    u32* to = (of_rows ? row_out : col_out) + (i64)line * UNIT * count + first;
    const bool in_pieces = count % 4 == 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 piece = threadIdx.x + k * THREADS, i = piece / (ABREAST_WORDS / 4), at = piece % (ABREAST_WORDS / 4) * 4;
        const u32* words = &lines[i][at];
        u32* out = to + (i64)i * count + at;
        if (in_pieces) {
            if (first + at < count) stream(out, make_uint4(words[0], words[1], words[2], words[3]));
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (first + at + j < count) out[j] = words[j];
        }
    }
}
