// NVFP4: the transpose of a matrix of nibbles whose rows are padded to 16, of its scales of 16 x 16 and of its amax, or of
// several matrices in one launch.
//
// A block of threads takes twice LPQ_WIDE rows of 256 nibbles; a thread 16 bytes of 8 rows.
#include "nibbles.cuh"
#include "transposes.cuh"

static_assert(THREADS == 2 * WIDE, "as many threads as there are 16 bytes of 8 rows");

// Rows of 8 * ceil(cols / 16) bytes become cols rows of 8 * ceil(rows / 16). The scales of 16 x 16
// blocks are turned with them, and the amax is copied.
struct Nibbles {
    uint4 piece[256][WIDE / 16];  // the nibbles of as many rows of each column
};

__device__ __forceinline__ void transpose_tile_of_nibbles(
    u32 block, const u8* x, u8* out, const u8* scale, u8* scale_out, const u32* amax, u32* amax_out, i64 rows, i64 cols
) {
    constexpr int HIGH = 2 * WIDE, BROAD = 256, ACROSS = BROAD / 32, PIECES = WIDE / 16;
    auto& piece = in_shared_memory<Nibbles>().piece;
    const u32 wide = (u32)((cols + BROAD - 1) / BROAD), down = block / wide, across = block - down * wide;
    const int at = threadIdx.x % ACROSS, chunk = threadIdx.x / ACROSS;
    const i64 high = (rows + 15) / 16, broad = (cols + 15) / 16, row = (i64)down * HIGH + chunk * 8;
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = load_piece(x, row + i, (i64)across * (BROAD / 2) + at * 16, rows, broad * 8);
    const i64 of_row = (i64)down * (HIGH / 16) + threadIdx.x % (HIGH / 16);
    const i64 of_col = (i64)across * (BROAD / 16) + threadIdx.x / (HIGH / 16);
    if (of_row < high && of_col < broad) scale_out[of_col * high + of_row] = scale[of_row * broad + of_col];
    if (block + threadIdx.x == 0) *amax_out = *amax;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        u32 n[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) n[i] = k == 0 ? v[i].x : k == 1 ? v[i].y : k == 2 ? v[i].z : v[i].w;
        transpose_8x8(n);
#pragma unroll
        for (int j = 0; j < 8; ++j) ((u32*)&piece[at * 32 + k * 8 + j][chunk / 4 ^ at])[chunk % 4] = n[j];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BROAD * PIECES / THREADS; ++k) {
        const int index = threadIdx.x + k * THREADS, line = index / PIECES, p = index % PIECES;
        const i64 to_row = (i64)across * BROAD + line, to = (i64)down * WIDE + p * 16;
        if (to_row >= cols || to >= high * 8) continue;
        const uint4 bytes = piece[line][p ^ (line / 32)];
        u8* target = out + to_row * high * 8 + to;
        if (high % 2 == 0) {
            *(uint4*)target = bytes;  // with `stream` it is 1 % slower
        } else {  // rows of an odd number of 8 bytes
            stream(target, make_uint2(bytes.x, bytes.y));
            if (to + 8 < high * 8) stream(target + 8, make_uint2(bytes.z, bytes.w));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) transpose_nibbles(
    const u8* x, u8* out, const u8* scale, u8* scale_out, const u32* amax, u32* amax_out, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    transpose_tile_of_nibbles(blockIdx.x, x, out, scale, scale_out, amax, amax_out, rows, cols);
}

// As the arguments that lpq.kernels.transposes passes: 8 bytes for each field; `sizes` is the rows, times 2^32, and the
// columns.
struct MatrixOfNibbles {
    const u8* x;
    u8* out;
    const u8* scale;
    u8* scale_out;
    const u32* amax;
    u32* amax_out;
    u64 sizes;
};
struct SeveralOfNibbles {
    MatrixOfNibbles of[13];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) transpose_several_of_nibbles(
    const __grid_constant__ SeveralOfNibbles several, u32 count
) {
    wait_for_the_one_before();
    u32 block = blockIdx.x;
    const MatrixOfNibbles& m = several.of[matrix_here<2 * WIDE, 256>(several, count, block)];
    transpose_tile_of_nibbles(block, m.x, m.out, m.scale, m.scale_out, m.amax, m.amax_out, (i64)(m.sizes >> 32),
                              (i64)(u32)m.sizes);
}
