// FP8: the transpose of a matrix of bytes and of its fp32 scales, or of several matrices in one launch.
//
// A block of threads takes 256 rows of LPQ_WIDE bytes; a thread 16 bytes of 8 rows.
#include "transposes.cuh"

static_assert(THREADS == 2 * WIDE, "as many threads as there are 16 bytes of 8 rows");

// out[cols, rows] = x[rows, cols], in bytes. Scales are turned as well: one for each 128 x 128, or with `scales` 1 a single
// one.
struct Bytes {
    uint4 piece[WIDE][16];  // 256 bytes of each column
};

__device__ __forceinline__ void transpose_tile_of_bytes(
    u32 block, const u8* x, u8* out, const u32* scale, u32* scale_out, u32 scales, i64 rows, i64 cols
) {
    constexpr int HIGH = 256, ACROSS = WIDE / 16;
    auto& piece = in_shared_memory<Bytes>().piece;
    const u32 wide = (u32)((cols + WIDE - 1) / WIDE), down = block / wide, across = block - down * wide;
    const int at = threadIdx.x % ACROSS, chunk = threadIdx.x / ACROSS;
    const i64 row = (i64)down * HIGH + chunk * 8, col = (i64)across * WIDE + at * 16;
    u32 w[4][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint4 v = load_piece(x, row + i, col, rows, cols);
        w[0][i] = v.x, w[1][i] = v.y, w[2][i] = v.z, w[3][i] = v.w;
    }
    if (scales == 1) {
        if (block + threadIdx.x == 0) *scale_out = *scale;
    } else if (threadIdx.x < 2 * UNITS_ACROSS) {
        const i64 high = (rows + UNIT - 1) / UNIT, broad = (cols + UNIT - 1) / UNIT;
        const i64 of_row = (i64)down * 2 + threadIdx.x % 2, of_col = (i64)across * UNITS_ACROSS + threadIdx.x / 2;
        if (of_row < high && of_col < broad) scale_out[of_col * high + of_row] = scale[of_row * broad + of_col];
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        transpose_4x4(w[k][0], w[k][1], w[k][2], w[k][3]), transpose_4x4(w[k][4], w[k][5], w[k][6], w[k][7]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint2* pieces = (uint2*)piece[at * 16 + k * 4 + j];
            pieces[chunk ^ (at * 2)] = make_uint2(w[k][j], w[k][j + 4]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WIDE * 16 / THREADS; ++k) {
        const int index = threadIdx.x + k * THREADS, line = index / 16, p = index % 16;
        const i64 to_row = (i64)across * WIDE + line, to = (i64)down * HIGH + p * 16;
        if (to_row >= cols || to >= rows) continue;
        const uint4 v = piece[line][p ^ (line / 16)];
        u8* target = out + to_row * rows + to;
        if (rows % 16 == 0) {
            stream(target, v);
        } else {
            const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (to + i < rows) target[i] = (u8)(word[i / 4] >> (8 * (i % 4)));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) transpose_bytes(
    const u8* x, u8* out, const u32* scale, u32* scale_out, u32 scales, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    transpose_tile_of_bytes(blockIdx.x, x, out, scale, scale_out, scales, rows, cols);
}

// As the arguments that lpq.kernels.transposes passes: 8 bytes for each field; `sizes` is the rows, times 2^32, and the
// columns.
struct MatrixOfBytes {
    const u8* x;
    u8* out;
    const u32* scale;
    u32* scale_out;
    u64 sizes;
};
struct SeveralOfBytes {
    MatrixOfBytes of[16];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) transpose_several_of_bytes(
    const __grid_constant__ SeveralOfBytes several, u32 count, u32 scales
) {
    wait_for_the_one_before();
    u32 block = blockIdx.x;
    const MatrixOfBytes& m = several.of[matrix_here<256, WIDE>(several, count, block)];
    transpose_tile_of_bytes(block, m.x, m.out, m.scale, m.scale_out, scales, (i64)(m.sizes >> 32), (i64)(u32)m.sizes);
}
