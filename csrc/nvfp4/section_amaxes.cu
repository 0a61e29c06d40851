// NVFP4: the amax of each section, and the amax of its rotated columns. A null pointer leaves the first out. They must be 0 before.
#define LPQ_SECTIONS
#include "sides.cuh"

static_assert(halves_are_16_apart<true>, "tiles are too wide");

extern "C" __global__ void __launch_bounds__(THREADS, fitting<LPQ_INPUT == LPQ_FP32 ? 255 : REGISTERS>) section_amaxes(
    const void* x, u32* plain, u32* rotated, const Sections sections, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(sections, rows, cols, blockIdx.x);
    if (t.section() == sections.count) return;
    u32 w[ROWS][WORDS], y[8][4], words[4];
    load(t, x, w);
    __shared__ Largest of_plain, of_rotated;
    const u32 in_plain = block_max(thread_amax(w), of_plain);
    rotate(t, w, y);
    rotated_amax(y, words);
    const u32 most = larger_pair(larger_pair(words[0], words[1]), larger_pair(words[2], words[3]));
    const u32 in_rotated = block_max(bf16_amax_bits(max(most & 0xffffu, most >> 16)), of_rotated);
    if (threadIdx.x) return;
    if (plain) atomicMax(plain + t.section(), in_plain);
    atomicMax(rotated + t.section(), in_rotated);
}
