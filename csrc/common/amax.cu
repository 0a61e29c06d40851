// The largest magnitude of a whole matrix, in two steps: one value for each block of threads, then one for all. And
// zeros, where magnitudes are found otherwise.
#include "tile.cuh"

constexpr int UNROLL = 4, BLOCK = 1024;
constexpr int PER_LOAD = 16 / sizeof(Source);

// parts[block]: the largest magnitude, as fp32 bits, of the elements that this block has read. x is contiguous.
extern "C" __global__ void __launch_bounds__(BLOCK, 2) amax_parts(const void* x, i64 count, u32* parts) {
    wait_for_the_one_before();
    const i64 loads = (u64)x % 16 == 0 ? count / PER_LOAD : 0, step = (i64)gridDim.x * BLOCK;
    const i64 thread = (i64)blockIdx.x * BLOCK + threadIdx.x;
    const Source* from = (const Source*)x;
    u32 amax = 0;
    i64 i = thread;
    for (; i + (UNROLL - 1) * step < loads; i += UNROLL * step) {
        u32 w[UNROLL][LOADED];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) load_words(from + (i + k * step) * PER_LOAD, w[k]);
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
#pragma unroll
            for (int j = 0; j < LOADED; ++j) amax = larger_magnitude(amax, w[k][j]);
    }
    for (; i < loads; i += step) {
        u32 w[LOADED];
        load_words(from + i * PER_LOAD, w);
#pragma unroll
        for (int j = 0; j < LOADED; ++j) amax = larger_magnitude(amax, w[j]);
    }
    for (i = loads * PER_LOAD + thread; i < count; i += step)
        amax = larger_magnitude(amax, load_element(from + i));
    __shared__ Largest largest;
    const u32 bits = block_max(amax_bits(element_value(larger_half(magnitude(amax)))), largest);
    if (threadIdx.x == 0) parts[blockIdx.x] = bits;
}

// The largest of the parts. One block.
extern "C" __global__ void __launch_bounds__(BLOCK) amax_finish(const u32* parts, i64 count, u32* amax) {
    let_the_next_one_come();
    wait_for_the_one_before();
    u32 bits = 0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) bits = max(bits, parts[i]);
    __shared__ Largest largest;
    bits = block_max(bits, largest);
    if (threadIdx.x == 0) *amax = bits;
}

// Words of two tensors, in which a kernel then finds largest magnitudes.
extern "C" __global__ void __launch_bounds__(BLOCK) zero(u32* first, i64 count, u32* second, i64 and_count) {
    let_the_next_one_come();
    wait_for_the_one_before();
    const i64 i = (i64)blockIdx.x * BLOCK + threadIdx.x;
    if (i < count) first[i] = 0;
    if (i < and_count) second[i] = 0;
}
