// The transpose of a matrix of bytes, and of one of nibbles whose rows are padded to 16; or those of several in one launch.
//
// A block of threads takes 256 rows of LPQ_WIDE bytes, or twice LPQ_WIDE rows of 256 nibbles; a thread 16 bytes of 8 rows.
#include "transposed.cuh"

static_assert(THREADS == 2 * WIDE, "as many threads as there are 16 bytes of 8 rows");

// 16 bytes of a row; what lies outside is 0.
__device__ __forceinline__ uint4 load_piece(const u8* x, i64 row, i64 at, i64 rows, i64 width) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row >= rows || at >= width) return v;
    const u8* from = x + row * width + at;
    if (width % 16 == 0 && (u64)x % 16 == 0) {
        load_16_bytes(from, v.x, v.y, v.z, v.w);
    } else {
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (at + i < width) word[i / 4] |= (u32)from[i] << (8 * (i % 4));
        v = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return v;
}

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

// The same in nibbles: rows of 8 * ceil(cols / 16) bytes become cols rows of 8 * ceil(rows / 16). The scales of 16 x 16
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

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) transpose_bytes(
    const u8* x, u8* out, const u32* scale, u32* scale_out, u32 scales, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    transpose_tile_of_bytes(blockIdx.x, x, out, scale, scale_out, scales, rows, cols);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) transpose_nibbles(
    const u8* x, u8* out, const u8* scale, u8* scale_out, const u32* amax, u32* amax_out, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    transpose_tile_of_nibbles(blockIdx.x, x, out, scale, scale_out, amax, amax_out, rows, cols);
}

// ---------------------------------------------------------------------------------------------- several matrices

// As the arguments that lpq.kernels.tiles passes: 8 bytes for each field; `sizes` is the rows, times 2^32, and the columns.
struct MatrixOfBytes {
    const u8* x;
    u8* out;
    const u32* scale;
    u32* scale_out;
    u64 sizes;
};
struct MatrixOfNibbles {
    const u8* x;
    u8* out;
    const u8* scale;
    u8* scale_out;
    const u32* amax;
    u32* amax_out;
    u64 sizes;
};
struct SeveralOfBytes {
    MatrixOfBytes of[16];
};
struct SeveralOfNibbles {
    MatrixOfNibbles of[13];
};

// The matrix to which this block of threads belongs; `block` becomes its number among those of that matrix.
template <int HIGH, int BROAD, class Several>
__device__ __forceinline__ int matrix_here(const Several& several, u32 count, u32& block) {
    int i = 0;
    for (; i < (int)count - 1; ++i) {
        const u64 sizes = several.of[i].sizes;
        const u32 tiles = ((u32)(sizes >> 32) + HIGH - 1) / HIGH * (((u32)sizes + BROAD - 1) / BROAD);
        if (block < tiles) break;
        block -= tiles;
    }
    return i;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) transpose_several_of_bytes(
    const __grid_constant__ SeveralOfBytes several, u32 count, u32 scales
) {
    wait_for_the_one_before();
    u32 block = blockIdx.x;
    const MatrixOfBytes& m = several.of[matrix_here<256, WIDE>(several, count, block)];
    transpose_tile_of_bytes(block, m.x, m.out, m.scale, m.scale_out, scales, (i64)(m.sizes >> 32), (i64)(u32)m.sizes);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) transpose_several_of_nibbles(
    const __grid_constant__ SeveralOfNibbles several, u32 count
) {
    wait_for_the_one_before();
    u32 block = blockIdx.x;
    const MatrixOfNibbles& m = several.of[matrix_here<2 * WIDE, 256>(several, count, block)];
    transpose_tile_of_nibbles(block, m.x, m.out, m.scale, m.scale_out, m.amax, m.amax_out, (i64)(m.sizes >> 32),
                              (i64)(u32)m.sizes);
}
