// FP8: several fp32 matrices, each with one scale, whose amax is given. LPQ_CODE: E4M3 or E5M2; LPQ_POW2: 1 where scales are
// powers of two.
#include "scale.cuh"
#include "table.cuh"

constexpr int THREADS = 256;
constexpr int CODES = 4096;  // that one block of threads writes

// As lpq_fp8.several passes it: 8 bytes for each field.
struct Matrix {
    const u32* values;
    u8* codes;
    float* scale;
    const u32* amax;
    i64 count;
    i64 first;
};

extern "C" __global__ void __launch_bounds__(THREADS) encode_several(const Matrix* table, i64 count) {
    wait_for_the_one_before();
    const Matrix m = line_here(table, count);
    const float factor = scale_from_amax(*m.amax, largest_value<LPQ_CODE>(), FLT_MAX_, LPQ_POW2);
    const i64 from = (blockIdx.x - m.first) * CODES;
    if (from == 0 && threadIdx.x == 0) *m.scale = __frcp_rn(factor);
#pragma unroll
    for (int k = 0; k < CODES / 4 / THREADS; ++k) {
        const i64 at = from + (k * THREADS + (i64)threadIdx.x) * 4;
        if (at >= m.count) return;
        u32 w[4];
        load_four(m.values, at, m.count, w);
        const float a = __uint_as_float(w[0]), b = __uint_as_float(w[1]), c = __uint_as_float(w[2]), d = __uint_as_float(w[3]);
        const u32 low = scale_pair<LPQ_CODE>(a, factor, b, factor), high = scale_pair<LPQ_CODE>(c, factor, d, factor);
        const u32 codes = (low & 0xffffu) | high << 16;
        if (at + 4 <= m.count && (u64)(m.codes + at) % 4 == 0) {
            *(u32*)(m.codes + at) = codes;
        } else {
            for (int j = 0; j < 4 && at + j < m.count; ++j) m.codes[at + j] = (u8)(codes >> 8 * j);
        }
    }
}
