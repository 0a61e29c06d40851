// The amax of each of several fp32 matrices or, with LPQ_COLUMNS or LPQ_LINES, of each of their columns or rows, over zeros.
#include "table.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int TILE = 128;  // rows and columns that one block of threads takes
constexpr int ROWS = TILE / WARPS;
#ifdef LPQ_COLUMNS
constexpr bool COLUMNS = true;
#else
constexpr bool COLUMNS = false;
#endif
#ifdef LPQ_LINES
constexpr bool BY_LINES = true;
#else
constexpr bool BY_LINES = false;
#endif

// As lpq.kernels.amaxes passes it: 8 bytes for each field.
struct Matrix {
    const u32* values;
    u32* amaxes;
    i64 rows, cols;
    i64 first;
};

__device__ __forceinline__ u32 max_of_warp(u32 bits) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, apart));
    return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS) amaxes(const Matrix* table, i64 count) {
    wait_for_the_one_before();
    constexpr int FOUND = COLUMNS ? TILE : 1;
    __shared__ u32 maxima[FOUND];
    for (int k = threadIdx.x; k < FOUND; k += THREADS) maxima[k] = 0;
    const Matrix m = line_here(table, count);
    const i64 place = blockIdx.x - m.first, tiles = (m.cols + TILE - 1) / TILE;
    const i64 top = place / tiles * TILE, left = place % tiles * TILE;
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * ROWS;
    u32 w[ROWS][4];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const i64 row = top + line + i, begin = row * m.cols;
        load_four(m.values, begin + left + 4 * lane, row < m.rows ? begin + m.cols : 0, w[i]);
    }
    if (BY_LINES) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            u32 most = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) most = max(most, w[i][j] & 0x7fffffffu);
            most = amax_bits(__uint_as_float(max_of_warp(most)));
            if (lane == 0 && most && top + line + i < m.rows) atomicMax(&m.amaxes[top + line + i], most);
        }
        return;
    }
    __syncthreads();
    u32 amax[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) amax[j] = max(amax[j], w[i][j] & 0x7fffffffu);
    }
    if (COLUMNS) {
#pragma unroll
        for (int j = 0; j < 4; ++j) atomicMax(&maxima[COLUMNS ? 4 * lane + j : 0], amax[j]);
    } else {
        const u32 most = max_of_warp(max(max(amax[0], amax[1]), max(amax[2], amax[3])));
        if (lane == 0) atomicMax(&maxima[0], most);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < FOUND; k += THREADS) {
        const u32 bits = amax_bits(__uint_as_float(maxima[k]));
        if (bits && left + k < m.cols) atomicMax(&m.amaxes[COLUMNS ? left + k : 0], bits);
    }
}
