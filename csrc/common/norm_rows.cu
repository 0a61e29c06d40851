// The numbers of a norm for each row of a matrix: the factor 1 / sqrt(mean square + eps), and with LPQ_CENTERED the
// mean before, around which the squares are summed then.
//
// With LPQ_RESIDUAL the matrix is the sum of two, rounded as PyTorch rounds it. It is written on the way, and the numbers
// are of the rounded sum.
//
// A warp takes a row. All rows begin at multiples of 16 bytes, and end there. A mean takes a second sum: the threads keep their part of
// a row for it where LPQ_BATCHES says that the row has no more batches than that, and read the row again otherwise.
#include "numbers.cuh"

#if !defined(LPQ_BATCHES)  // no switch: the batches of a row that are kept
#define LPQ_BATCHES 0
#endif
constexpr int BLOCK = 128, WARPS = BLOCK / 32, UNROLL = 4, BATCHES = LPQ_BATCHES, PIECE = 4 * PER_WORD;
#ifdef LPQ_CENTERED
constexpr bool CENTERED = true;
#else
constexpr bool CENTERED = false;
#endif
#ifdef LPQ_RESIDUAL
constexpr bool ADDS = true;
#else
constexpr bool ADDS = false;
#endif

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}

__device__ __forceinline__ void split(uint4 v, u32 (&w)[4]) { w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }

// The sums of the elements of two words.
__device__ __forceinline__ u32 added(u32 a, u32 b) {
#if LPQ_INPUT == LPQ_FP32
    return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
#else
    const u32 x[1] = {a}, y[1] = {b};
    return rounded(value(x, 0) + value(y, 0), value(x, 1) + value(y, 1));
#endif
}

// A thread's pieces of a row, from `first` on: one in 32, as each thread of the warp has one in turn.
struct Batch {
    u32 w[UNROLL][4];

    // With a residual the row is the sum of both, which is written. All loads come before the first write, which they would
    // wait for: `sum` may be the memory of the others, as far as nvcc knows.
    template <bool WITH_RESIDUAL>
    __device__ __forceinline__ void read(const uint4* row, const uint4* residual, uint4* sum, i64 pieces, i64 first) {
        u32 r[UNROLL][4];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (first + 32 * k < pieces) {
                split(row[first + 32 * k], w[k]);
                if (WITH_RESIDUAL) split(residual[first + 32 * k], r[k]);
            }
        if (!WITH_RESIDUAL) return;
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (first + 32 * k < pieces) {
#pragma unroll
                for (int i = 0; i < 4; ++i) w[k][i] = added(w[k][i], r[k][i]);
                sum[first + 32 * k] = make_uint4(w[k][0], w[k][1], w[k][2], w[k][3]);
            }
    }

    // The value that `part` makes of a sum and each element.
    template <class Part>
    __device__ __forceinline__ float add_to(float total, i64 pieces, i64 first, Part part) const {
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (first + 32 * k < pieces) {
#pragma unroll
                for (int j = 0; j < PIECE; ++j) total = part(value(w[k], j), total);
            }
        return total;
    }
};

// The sum over a row that is read for it.
template <bool WITH_RESIDUAL, class Part>
__device__ __forceinline__ float row_sum(const uint4* row, const uint4* residual, uint4* sum, i64 pieces, Part part) {
    float total = 0.0f;
    for (i64 first = threadIdx.x & 31; first < pieces; first += 32 * UNROLL) {
        Batch batch;
        batch.read<WITH_RESIDUAL>(row, residual, sum, pieces, first);
        total = batch.add_to(total, pieces, first, part);
    }
    return warp_sum(total);
}

// The sum over a row that is kept.
template <class Part>
__device__ __forceinline__ float row_sum(const Batch (&kept)[BATCHES + 1], i64 pieces, Part part) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < BATCHES; ++i) total = kept[i].add_to(total, pieces, (threadIdx.x & 31) + 32 * UNROLL * i, part);
    return warp_sum(total);
}

// residual, sum: null without LPQ_RESIDUAL.
extern "C" __global__ void __launch_bounds__(BLOCK) norm_rows(
    const void* x, const void* residual, void* sum, float* mean, float* factor, float eps, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const i64 index = (i64)blockIdx.x * WARPS + threadIdx.x / 32, pieces = cols / PIECE;
    if (index >= rows) return;
    const uint4 *row = (const uint4*)x + index * pieces, *other = (const uint4*)residual + index * pieces;
    uint4* out = (uint4*)sum + index * pieces;
    const auto itself = [](float v, float sum) { return sum + v; };
    float center = 0.0f, squares;
    const auto square = [&center](float v, float sum) {
        const float apart = CENTERED ? v - center : v;
        return fmaf(apart, apart, sum);
    };
    if (!CENTERED) {
        squares = row_sum<ADDS>(row, other, out, pieces, square);
    } else if (BATCHES) {
        Batch kept[BATCHES + 1];  // no array is empty
#pragma unroll
        for (int i = 0; i < BATCHES; ++i) kept[i].read<ADDS>(row, other, out, pieces, (threadIdx.x & 31) + 32 * UNROLL * i);
        center = row_sum(kept, pieces, itself) / (float)cols;
        squares = row_sum(kept, pieces, square);
    } else {
        center = row_sum<ADDS>(row, other, out, pieces, itself) / (float)cols;
        // A thread reads the elements of the sum that it has written itself.
        squares = row_sum<false>(ADDS ? out : row, other, out, pieces, square);
    }
    if (threadIdx.x % 32) return;
    if (CENTERED) mean[index] = center;
    factor[index] = rsqrtf(squares / (float)cols + eps);
}
