// NVFP4 by MS-EDEN: one operand of a matrix, from one read.
//
// LPQ_COL: it is the column operand, so a block of threads first brings 128 rows of some columns to shared memory.
#include "eden.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) encode_eden(
    const void* x, u8* data, u8* scale, u32* amax, u32* turn_out, const u32* amaxes, u32 count, const u64* seed, i64 offset,
    i64 rows, i64 cols
) {
    wait_for_the_one_before();
    __shared__ Largest largest;
    const u32 found = largest_of(amaxes, count, largest);
    const u32 bits = eden::operand_amax(found);
    const u64 key = *seed;
    if (blockIdx.x == 0 && threadIdx.x == 0) *amax = bits, *turn_out = (u32)key;
    const int part = threadIdx.x % eden::PARTS;
    float v[16];
#ifdef LPQ_COL
    __shared__ eden::Lines tile;
    const i64 across = (cols + eden::LINES - 1) / eden::LINES, groups = (rows + 127) / 128;
    const i64 group = blockIdx.x / across, first = (blockIdx.x - group * across) * eden::LINES;
    const int col = threadIdx.x % eden::LINES;
#pragma unroll
    for (int k = 0; k < 128 * eden::LINES / THREADS; ++k) {
        const int row = threadIdx.x / eden::LINES + k * (THREADS / eden::LINES);
        const i64 at = group * 128 + row;
        const bool inside = at < rows && first + col < cols;
        tile.at(row, col) = inside ? load_element((const Source*)x + at * cols + first + col) : 0;
    }
    __syncthreads();
    const i64 line = first + threadIdx.x / eden::PARTS, block = group * eden::PARTS + part, blocks = groups * eden::PARTS;
    const bool wanted = line < cols;
    tile.take(part, v);
    const u32 of_line = (u32)line, of_block = (u32)(block + offset / 16), direction = 1;
#else
    const i64 blocks = (cols + 127) / 128 * eden::PARTS, at = (i64)blockIdx.x * THREADS + threadIdx.x;
    const i64 line = at / blocks, block = at - line * blocks, col = block * 16;
    const bool wanted = line < rows;
    const Source* from = (const Source*)x + line * cols + col;
    if (wanted && col + 16 <= cols && cols % 8 == 0 && (u64)x % 16 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 words[WORDS];
#pragma unroll
            for (int j = 0; j < WORDS; j += LOADED) {
                u32 loaded[LOADED];
                load_words(from + half * 8 + j * PER_WORD, loaded);
#pragma unroll
                for (int k = 0; k < LOADED; ++k) words[j + k] = loaded[k];
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) v[half * 8 + i] = value(words, i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = wanted && col + i < cols ? element_value(load_element(from + i)) : 0.0f;
    }
    const u32 of_line = (u32)(line + offset), of_block = (u32)block, direction = 0;
#endif
    uint4 drawn[1];
    philox(of_block, of_line, direction, key, drawn);
    eden::rotate(part, eden::signs(part, (u32)key), v);
    u32 code;
    const uint2 codes = eden::encode(v, tensor_scale(bits), drawn[0].x & 0xffffffu, code);
    if (!wanted) return;
    stream(data + (line * blocks + block) * 8, codes);
    scale[line * blocks + block] = (u8)code;
}
