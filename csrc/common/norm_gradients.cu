// The gradients of a norm that subtracts no mean, from one read: of its input, and, for each block of threads, its part of
// the sums over all rows that are the gradient of the weight. Where the norm rounds on its way (LPQ_ROUNDS), autograd's
// gradients do, too. With LPQ_OFFSET the factor of a column is 1 + weight. With LPQ_RESIDUAL a gradient is added that the
// input has from elsewhere, as from the residual stream: to the rounded gradient, as autograd adds them.
//
// A block takes one row after the other, and a thread the same 16 bytes of each. It reads them while the row before is
// computed. All rows begin at multiples of 16 bytes, and end there; they have no more than 16 bytes for each of the
// LPQ_BLOCK threads.
#include "numbers.cuh"

#if !defined(LPQ_BLOCK)  // no switch: the threads of a block
#define LPQ_BLOCK 256
#endif
constexpr int BLOCK = LPQ_BLOCK, WARPS = BLOCK / 32, PIECE = 4 * PER_WORD;
#ifdef LPQ_ROUNDS
constexpr bool ROUNDS = true;
#else
constexpr bool ROUNDS = false;
#endif
#ifdef LPQ_OFFSET
constexpr bool OFFSET = true;
#else
constexpr bool OFFSET = false;
#endif
#ifdef LPQ_RESIDUAL
constexpr bool ADDS = true;
#else
constexpr bool ADDS = false;
#endif

#if LPQ_INPUT == LPQ_FP32
__device__ __forceinline__ u32 word(const float* x) { return __float_as_uint(x[0]); }
__device__ __forceinline__ float nearest(float x) { return x; }
#else
__device__ __forceinline__ u32 word(const float* x) { return rounded(x[0], x[1]); }
__device__ __forceinline__ float nearest(float x) { return element_value(rounded(x, 0.0f)); }
#endif

// A thread's elements of a row.
struct Piece {
    u32 w[4];

    __device__ __forceinline__ void read(const void* matrix, i64 row, i64 pieces) {
        const uint4 v = threadIdx.x < pieces ? ((const uint4*)matrix)[row * pieces + threadIdx.x] : make_uint4(0, 0, 0, 0);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
    __device__ __forceinline__ float operator[](int j) const { return value(w, j); }
};

// The gradient of a normalized element, of the output's gradient.
__device__ __forceinline__ float inner(float dy, float weight) {
    const float g = dy * (OFFSET ? 1.0f + weight : weight);
    return ROUNDS ? nearest(g) : g;
}

__device__ __forceinline__ float block_sum(float x, float (&parts)[WARPS]) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += parts[i];
    return sum;
}

// sums[block][column], or null: the weight needs no gradient. other: the gradient from elsewhere, or null.
extern "C" __global__ void __launch_bounds__(BLOCK, 1024 / BLOCK) norm_gradients(
    const void* x, const void* dy, const void* weight, const float* factor, const void* other, void* dx, float* sums,
    i64 rows, i64 cols
) {
    wait_for_the_one_before();
    __shared__ float parts[2][WARPS];
    const i64 pieces = cols / PIECE;
    Piece of_weight, of_x, of_dy;
    of_weight.read(weight, 0, pieces);
    float sum[PIECE] = {};
    i64 row = blockIdx.x;
    if (row < rows) of_x.read(x, row, pieces), of_dy.read(dy, row, pieces);
    for (int turn = 0; row < rows; turn ^= 1) {
        const float r = factor[row];
        Piece of_other;  // which arrives while the threads of the block wait for each other
        if (ADDS) of_other.read(other, row, pieces);
        float dot = 0.0f;
#pragma unroll
        for (int j = 0; j < PIECE; ++j) {
            const float normed = of_x[j] * r;
            sum[j] += ROUNDS ? nearest(of_dy[j] * nearest(normed)) : of_dy[j] * normed;
            dot = fmaf(inner(of_dy[j], of_weight[j]), of_x[j], dot);
        }
        const Piece x_now = of_x, dy_now = of_dy;
        const i64 next = row + gridDim.x;
        if (next < rows) of_x.read(x, next, pieces), of_dy.read(dy, next, pieces);
        const float back = block_sum(dot, parts[turn]) / (float)cols * r * r * r;
        float out[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j)  // written out, so that nvcc fuses the same product with or without a residual
            out[j] = fmaf(-x_now[j], back, __fmul_rn(inner(dy_now[j], of_weight[j]), r));
        if (ADDS)
#pragma unroll
            for (int j = 0; j < PIECE; ++j) out[j] = nearest(out[j]) + of_other[j];
        if (threadIdx.x < pieces)
            ((uint4*)dx)[row * pieces + threadIdx.x] =
                make_uint4(word(out), word(out + PER_WORD), word(out + 2 * PER_WORD), word(out + 3 * PER_WORD));
        row = next;
    }
    if (!sums || threadIdx.x >= pieces) return;
#pragma unroll
    for (int j = 0; j < PIECE; ++j) sums[blockIdx.x * cols + threadIdx.x * PIECE + j] = sum[j];
}
