// NVFP4 by MS-EDEN: one operand of a matrix, from one read.
//
// A thread takes a block of 16 along the contraction, and eight lanes a group of 128, which is rotated and corrected together.
// LPQ_COL: it is the column operand, so a block of threads first brings 128 rows of LINES columns to shared memory.
#include "decode.cuh"
#include "e2m1.cuh"
#include "philox.cuh"
#include "tile.cuh"

namespace eden {

constexpr int PARTS = 8;        // blocks of 16 in a group
constexpr u32 ONE = 0x38;       // E4M3's code of 1
constexpr double LARGEST = 6.0 / (0.93 * 17 / 16);
constexpr float INVERSE = (float)(1.0 / LARGEST);
constexpr float ROOM = (float)(4.0 * 6.0 * 448.0 / (255.99 * LARGEST));
constexpr float ROOT = 0.08838834764831845f;  // 128 ** -0.5
constexpr u32 OF_PASS = 2;      // in place of a direction

__device__ __forceinline__ float from(int part, int apart, float v) {
    const float other = __shfl_xor_sync(~0u, v, apart);
    return part & apart ? __fsub_rn(other, v) : __fadd_rn(v, other);
}

// Part `part` of a group: times signs, which its turn draws, and the Hadamard matrix of 128.
__device__ __forceinline__ void rotate(int part, u32 turn, float (&v)[16]) {
    uint4 words[1];
    philox(0, 0, OF_PASS, (u64)turn << 32, words);
    const uint2 half = part & 4 ? make_uint2(words[0].z, words[0].w) : make_uint2(words[0].x, words[0].y);
    const u32 minus = (part & 2 ? half.y : half.x) >> (part & 1 ? 16 : 0);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(v[i], minus >> i & 1 ? -ROOT : ROOT);
#pragma unroll
    for (int apart = PARTS / 2; apart >= 1; apart /= 2)
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = from(part, apart, v[i]);
#pragma unroll
    for (int apart = 8; apart >= 1; apart /= 2)
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (!(i & apart)) {
                const float a = v[i], b = v[i + apart];
                v[i] = __fadd_rn(a, b), v[i + apart] = __fsub_rn(a, b);
            }
}

// The sum of the group, of the sums of its parts.
__device__ __forceinline__ float of_group(float sum) {
#pragma unroll
    for (int apart = PARTS / 2; apart >= 1; apart /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, apart));
    return sum;
}

// E4M3's number below `scale`, or the next one, by 24 random bits.
__device__ __forceinline__ u32 rounded(float scale, u32 number) {
    const u32 near = cast_pair<E4M3>(scale, 0.0f) & 0xff;
    const u32 below = decode<E4M3>(near) > scale ? near - 1 : near, above = min(below + 1, E4M3::largest);
    const float lower = decode<E4M3>(below), upper = decode<E4M3>(above);
    const float chance = __fmul_rn((float)number, 5.9604645e-08f);  // 2^-24
    const bool up = upper > lower && __fmul_rn(chance, __fsub_rn(upper, lower)) < __fsub_rn(scale, lower);
    return up ? below + 1 : below;
}

// The codes and the scale of a block of 16, which is rotated.
__device__ __forceinline__ uint2 encode(const float (&v)[16], float overall, u32 number, u32& scale_code) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) most = max(most, __float_as_uint(fabsf(v[i])));
    u32 code = block_scale(__uint_as_float(amax_bits(__uint_as_float(most))), __fmul_rn(overall, INVERSE)) & 0xff;
    if (code == 0) code = ONE;
    const float scale = decode<E4M3>(code);
    const float quotient = __frcp_rn(__fmul_rn(scale, __frcp_rn(overall)));
    const float factor = quotient > FLT_MAX_ ? FLT_MAX_ : quotient;
    u32 codes[2] = {};
    float over = 0.0f, under = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float z = __fmul_rn(v[i], factor), size = fabsf(z);
        const u32 n = nearest(size) - ROUND_BITS;
        codes[i / 8] |= (n | (__float_as_uint(z) >> 28 & 8)) << (4 * (i % 8));
        const float square = __fmul_rn(z, z), product = __fmul_rn(size, half_value(n << 9) * 16384.0f);
        over = i ? __fadd_rn(over, square) : square, under = i ? __fadd_rn(under, product) : product;
    }
    over = of_group(over), under = of_group(under);
    const float correction = under == 0.0f ? 1.0f : __fdiv_rn(over, under);
    scale_code = rounded(__fmul_rn(scale, correction), number);
    return make_uint2(codes[0], codes[1]);
}

#ifdef LPQ_COL
constexpr int LINES = 32;  // of the operand, which a block of threads takes

struct Rows {
    float of[128 * (LINES + 1) + PARTS * 20];

    // Parts of a column are so far apart that the lanes of a warp, with eight parts of four columns, read from all banks.
    __device__ __forceinline__ float& at(int row, int col) { return of[row * (LINES + 1) + row / 16 * 20 + col]; }
};
#endif

}  // namespace eden

extern "C" __global__ void __launch_bounds__(THREADS) encode_eden(
    const void* x, u8* data, u8* scale, u32* amax, u32* turn_out, const u32* amaxes, u32 count, const u64* seed, i64 offset,
    i64 rows, i64 cols
) {
    wait_for_the_one_before();
    __shared__ Largest largest;
    const u32 found = largest_of(amaxes, count, largest);
    const float roomy = __fmul_rn(__uint_as_float(found), eden::ROOM);
    const u32 bits = found >= INF ? found : __float_as_uint(roomy > FLT_MAX_ ? FLT_MAX_ : roomy);
    const u64 key = *seed;
    if (blockIdx.x == 0 && threadIdx.x == 0) *amax = bits, *turn_out = (u32)key;
    const int part = threadIdx.x % eden::PARTS;
    float v[16];
#ifdef LPQ_COL
    __shared__ eden::Rows tile;
    const i64 across = (cols + eden::LINES - 1) / eden::LINES, groups = (rows + 127) / 128;
    const i64 group = blockIdx.x / across, first = (blockIdx.x - group * across) * eden::LINES;
    const int col = threadIdx.x % eden::LINES;
#pragma unroll
    for (int k = 0; k < 128 * eden::LINES / THREADS; ++k) {
        const int row = threadIdx.x / eden::LINES + k * (THREADS / eden::LINES);
        const i64 at = group * 128 + row;
        const bool inside = at < rows && first + col < cols;
        tile.at(row, col) = inside ? element_value(load_element((const Source*)x + at * cols + first + col)) : 0.0f;
    }
    __syncthreads();
    const i64 line = first + threadIdx.x / eden::PARTS, block = group * eden::PARTS + part, blocks = groups * eden::PARTS;
    const bool wanted = line < cols;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = tile.at(part * 16 + i, threadIdx.x / eden::PARTS);
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
    eden::rotate(part, (u32)key, v);
    u32 code;
    const uint2 codes = eden::encode(v, tensor_scale(bits), drawn[0].x & 0xffffffu, code);
    if (!wanted) return;
    stream(data + (line * blocks + block) * 8, codes);
    scale[line * blocks + block] = (u8)code;
}
