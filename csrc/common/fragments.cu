// Casting fragments of matrices, as far as it is the same for all formats: words for other ranks, and matrices turned round.
#include "numbers.cuh"

constexpr int THREADS = 256, HEAD = 4;
constexpr u32 NOTHING = 0x80000000u;
constexpr int WORDS_OF_BLOCK = 4096;
constexpr int SIDE = 64;

// As lpq.kernels.fragments.SentWords: 8 bytes for each field.
struct SentWords {
    const u32* values;
    u32* to;
    i64 start, stop, cols;
    i64 reach;  // less than 0: all elements are sent
    i64 rank, words;
    i64 first;
};

// As lpq.kernels.fragments.Turned.
struct Turned {
    const u8* from;
    u8* to;
    i64 rows, cols, bits;
    i64 first;
};

template <class Entry>
__device__ __forceinline__ Entry entry_here(const Entry* table, i64 count) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (table[middle].first <= (i64)blockIdx.x) low = middle;
        else high = middle;
    }
    return table[low];
}

// The word of a matrix's elements, or of what all ranks send of their fragments' ends.
__device__ __forceinline__ u32 word_of(const SentWords& t, i64 word) {
    if (t.reach < 0) return word >= t.start && word < t.stop ? t.values[word - t.start] : NOTHING;
    const i64 size = HEAD + 2 * t.reach, rank = word / size, at = word - rank * size, length = t.stop - t.start;
    if (rank != t.rank) return NOTHING;
    if (at < HEAD) {
        const i64 place = at < 2 ? t.start : t.stop;
        return (u32)(at % 2 ? place % t.cols : place / t.cols);
    }
    if (at < HEAD + t.reach) return at - HEAD < length ? t.values[at - HEAD] : NOTHING;
    return size - at <= length ? t.values[length - (size - at)] : NOTHING;
}

extern "C" __global__ void __launch_bounds__(THREADS) send_words(const SentWords* table, i64 count) {
    wait_for_the_one_before();
    const SentWords t = entry_here(table, count);
    const i64 from = (blockIdx.x - t.first) * WORDS_OF_BLOCK;
    for (int k = threadIdx.x; k < WORDS_OF_BLOCK && from + k < t.words; k += THREADS) t.to[from + k] = word_of(t, from + k);
}

template <class T>
__device__ __forceinline__ void turn_tile(const Turned& t, i64 top, i64 left, u8* shared) {
    T(*tile)[SIDE + 1] = (T(*)[SIDE + 1])shared;
    const T* from = (const T*)t.from;
    T* to = (T*)t.to;
    const int lane = threadIdx.x % SIDE;
    for (int i = threadIdx.x / SIDE; i < SIDE; i += THREADS / SIDE)
        if (top + i < t.rows && left + lane < t.cols) tile[i][lane] = from[(top + i) * t.cols + left + lane];
    __syncthreads();
    for (int i = threadIdx.x / SIDE; i < SIDE; i += THREADS / SIDE)
        if (left + i < t.cols && top + lane < t.rows) to[(left + i) * t.rows + top + lane] = tile[lane][i];
}

// Two elements in a byte, the even column low; lines are padded to 16 elements, in the result with zeros.
__device__ __forceinline__ void turn_nibbles(const Turned& t, i64 top, i64 left, u8* shared) {
    u8(*tile)[SIDE / 2 + 1] = (u8(*)[SIDE / 2 + 1])shared;
    const i64 wide = (t.cols + 15) / 16 * 8, high = (t.rows + 15) / 16 * 8;
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < SIDE; i += THREADS / 32)
        tile[i][lane] = top + i < t.rows && left / 2 + lane < wide ? t.from[(top + i) * wide + left / 2 + lane] : 0;
    __syncthreads();
    for (int i = threadIdx.x / 32; i < SIDE; i += THREADS / 32) {
        if (left + i >= t.cols || top / 2 + lane >= high) continue;
        const int shift = i % 2 * 4;
        const u32 low = tile[2 * lane][i / 2] >> shift & 15, upper = tile[2 * lane + 1][i / 2] >> shift & 15;
        t.to[(left + i) * high + top / 2 + lane] = (u8)(low | upper << 4);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) turn(const Turned* table, i64 count) {
    wait_for_the_one_before();
    alignas(16) __shared__ u8 shared[SIDE * (SIDE + 1) * 4];
    const Turned t = entry_here(table, count);
    const i64 place = blockIdx.x - t.first, tiles = (t.cols + SIDE - 1) / SIDE;
    const i64 top = place / tiles * SIDE, left = place % tiles * SIDE;
    if (t.bits == 4) turn_nibbles(t, top, left, shared);
    else if (t.bits == 8) turn_tile<u8>(t, top, left, shared);
    else turn_tile<u32>(t, top, left, shared);
}
