// The numbers of a norm for each row of a matrix: the factor 1 / sqrt(mean square + eps), and with LPQ_CENTERED the
// mean before, around which the squares are summed then.
//
// A warp takes a row. All rows begin at multiples of 16 bytes, and end there.
#include "numbers.cuh"

constexpr int BLOCK = 256, WARPS = BLOCK / 32, UNROLL = 4, PIECE = 4 * PER_WORD;
#ifdef LPQ_CENTERED
constexpr bool CENTERED = true;
#else
constexpr bool CENTERED = false;
#endif

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}

__device__ __forceinline__ void split(uint4 v, u32 (&w)[4]) { w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }

// The sum over a row of what `part` adds to a sum.
template <class Part>
__device__ __forceinline__ float row_sum(const uint4* row, i64 pieces, Part part) {
    float sum = 0.0f;
    for (i64 first = threadIdx.x & 31; first < pieces; first += 32 * UNROLL) {
        u32 w[UNROLL][4];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (first + 32 * k < pieces) split(row[first + 32 * k], w[k]);
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (first + 32 * k < pieces)
#pragma unroll
                for (int j = 0; j < PIECE; ++j) sum = part(value(w[k], j), sum);
    }
    return warp_sum(sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK) norm_rows(
    const void* x, float* mean, float* factor, float eps, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const i64 index = (i64)blockIdx.x * WARPS + threadIdx.x / 32, pieces = cols / PIECE;
    if (index >= rows) return;
    const uint4* row = (const uint4*)x + index * pieces;
    float center = 0.0f;
    if (CENTERED) {
        center = row_sum(row, pieces, [](float v, float sum) { return sum + v; }) / (float)cols;
        if (threadIdx.x % 32 == 0) mean[index] = center;
    }
    const float squares = row_sum(row, pieces, [center](float v, float sum) {
        const float apart = CENTERED ? v - center : v;
        return fmaf(apart, apart, sum);
    });
    if (threadIdx.x % 32 == 0) factor[index] = rsqrtf(squares / (float)cols + eps);
}
