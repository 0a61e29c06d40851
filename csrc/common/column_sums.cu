// The sums of the columns of a matrix in fp32, as elements of the dtype of the input: of the parts that blocks have of a gradient.
//
// A block takes 32 columns, and its warps take rows in turn.
#include "numbers.cuh"

constexpr int WARPS = 32;

extern "C" __global__ void __launch_bounds__(32 * WARPS) column_sums(const float* parts, void* sums, i64 rows, i64 cols) {
    wait_for_the_one_before();
    __shared__ float of_warps[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 col = (i64)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (col < cols)
#pragma unroll 8
        for (i64 row = warp; row < rows; row += WARPS) sum += parts[row * cols + col];
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp || col >= cols) return;
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += of_warps[i][lane];
#if LPQ_INPUT == LPQ_FP32
    ((float*)sums)[col] = sum;
#else
    ((Element*)sums)[col] = (Element)rounded(sum, 0.0f);
#endif
}
