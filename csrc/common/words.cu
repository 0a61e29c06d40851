// Words that the host knows when it launches. A CUDA graph keeps them with the launch, and writes them at each replay.
#include "order.cuh"

constexpr int WORDS = 448;  // with what else is passed, less than the 4 KB that every driver takes

struct Words {
    long long word[WORDS];
};

extern "C" __global__ void __launch_bounds__(WORDS) write_words(long long* to, const __grid_constant__ Words words, long long count) {
    wait_for_the_one_before();
    if (threadIdx.x < count) to[threadIdx.x] = words.word[threadIdx.x];
}
