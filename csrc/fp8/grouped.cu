// Products of rows in groups on Hopper's tensor cores, E4M3 or E5M2 each, summed exactly: what the tensor cores add up
// over 128 elements, in fewer bits than fp32 has, is added to sums in fp32.
//
// Without LPQ_COLUMNS: the rows of each group times its matrix of a stack, [groups, N, K]. With it: for each group the
// product of its columns of two matrices, [M, columns] and [N, columns]; groups begin at multiples of 128 there, and what
// lies between them is zero.
// LPQ_A_E5M2, LPQ_B_E5M2: the element types, where they are not E4M3.
// LPQ_BLOCKS: scales are of blocks of 128 columns, and in b of LPQ_BLOCKS lines (1 or 128). Else a factor of each line or
// group.
// LPQ_TALL: rows of a tile, 128 or 256.
//
// Each block of threads takes tile after tile. One thread has tiles of both operands copied, STAGES of them ahead, while
// two warpgroups multiply, each the half of a tile's rows.
#include "hopper.cuh"

#ifdef LPQ_COLUMNS
constexpr bool COLUMNS = true;
#else
constexpr bool COLUMNS = false;
#endif
#ifdef LPQ_A_E5M2
constexpr bool A_E5M2 = true;
#else
constexpr bool A_E5M2 = false;
#endif
#ifdef LPQ_B_E5M2
constexpr bool B_E5M2 = true;
#else
constexpr bool B_E5M2 = false;
#endif
#ifdef LPQ_BLOCKS
constexpr int BLOCKS = LPQ_BLOCKS;
#else
constexpr int BLOCKS = 0;
#endif
#if !defined(LPQ_TALL)
#define LPQ_TALL 128
#endif
constexpr int TALL = LPQ_TALL, WIDE = 128, DEEP = 128;  // rows and columns of a tile, and the elements of a step
constexpr int A_BYTES = TALL * DEEP, B_BYTES = WIDE * DEEP, BYTES = A_BYTES + B_BYTES;
constexpr int STAGES = TALL == 256 ? 4 : 6;
constexpr int PARTS = TALL / 128;  // times 64 rows that each warpgroup multiplies
constexpr int BAND = 8;            // tiles below each other that are taken one after the other
constexpr int GROUP = 128;         // the threads of a warpgroup

struct Scales {
    const float* first;
    i64 group, line, step;  // how far apart they are
};

struct Sizes {
    i64 groups, tall, wide, deep;
};

struct Tile {
    int group, down, across;  // its group, and its place there, in rows and columns
    int begin, end;           // of the group
};

// Tiles in the order in which blocks of threads take them.
class Tiles {
    const int* ends;
    const Sizes& sizes;
    i64 at, before = 0;
    int group = 0, begin = 0, end;

    __device__ int high() const { return COLUMNS ? (int)sizes.tall : end - begin; }
    __device__ int down() const { return (high() + TALL - 1) / TALL; }
    __device__ int across() const { return ((int)sizes.wide + WIDE - 1) / WIDE; }

public:
    __device__ Tiles(const int* ends, const Sizes& sizes) : ends(ends), sizes(sizes), at(blockIdx.x), end(ends[0]) {}

    __device__ bool next(Tile& tile) {
        while (at >= before + (i64)down() * across()) {
            before += (i64)down() * across();
            if (++group == sizes.groups) return false;
            begin = end;
            end = ends[group];
        }
        const int here = (int)(at - before), band = here / (BAND * across()), first = band * BAND;
        const int high = min(BAND, down() - first), inside = here - first * across();
        tile = {group, (first + inside % high) * TALL, inside / high * WIDE, begin, end};
        at += gridDim.x;
        return true;
    }
};

// A stage of the ring in shared memory, and the parity of its phase.
struct Turn {
    u32 stage = 0, parity = 0;
    __device__ void pass() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ int first_of(const Tile& tile) { return COLUMNS ? tile.begin : 0; }
__device__ __forceinline__ int last_of(const Tile& tile, const Sizes& sizes) { return COLUMNS ? tile.end : (int)sizes.deep; }

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Among the four lanes that share a row: lane i gets the i-th of the words that each has, in the order of the lanes.
__device__ __forceinline__ void exchange(u32 (&w)[4]) {
#pragma unroll
    for (int apart = 1; apart <= 2; ++apart) {
        const bool upper = threadIdx.x & apart;
        const int other = apart == 1 ? 2 : 1;  // between the words of one exchange
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int low = k * other, high = low + apart;
            const u32 got = __shfl_xor_sync(~0u, upper ? w[low] : w[high], apart);
            (upper ? w[low] : w[high]) = got;
        }
    }
}

__device__ __forceinline__ void wait_for_warpgroup(int which) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + which), "n"(GROUP) : "memory");
}

// Where a thread's sums lie in the 64 rows and 128 columns that its warpgroup multiplies at a time: sum i is in row
// `row` or 8 below, and in column `column` of each 8 columns or the one beside it.
struct Place {
    int row = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
};

// Write 64 rows, multiplied by the factors of rows and columns where these are not in the sums already.
__device__ __forceinline__ void write(
    const float (&sums)[64], u16* out, const float* of_rows, i64 apart_a, const float* of_columns, i64 apart_b, int rows,
    int columns, i64 wide) {
    const Place place;
#pragma unroll
    for (int four = 0; four < 4; ++four) {
        float of_column[4][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int at = (four * 4 + i / 2) * 8 + place.column + i % 2;
            of_column[i / 2][i % 2] = BLOCKS ? 1 : __ldg(of_columns + (at < columns ? apart_b * at : 0));
        }
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const int line = place.row + below * 8;
            const float of_row = BLOCKS || line >= rows ? 1 : __ldg(of_rows + apart_a * line);
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = four * 16 + i * 4 + below * 2;
                words[i] = pair(sums[j] * of_row * of_column[i][0], sums[j + 1] * of_row * of_column[i][1]);
            }
            exchange(words);
            const int at = (four * 4 + threadIdx.x % 4) * 8;
            if (line < rows && at < columns)
                *(uint4*)(out + line * wide + at) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// Have tiles of both operands copied, one step after the other.
__device__ __forceinline__ void copy_steps(
    const TensorMap& a, const TensorMap& b, Tiles& tiles, const Sizes& sizes, u32 ring, u32 full, u32 empty) {
    Tile tile;
    Turn turn;
    while (tiles.next(tile)) {
        const int row_a = COLUMNS ? tile.down : tile.begin + tile.down;
        const int row_b = COLUMNS ? tile.across : tile.group * (int)sizes.wide + tile.across;
#pragma unroll 1
        for (int k = first_of(tile); k < last_of(tile, sizes); k += DEEP, turn.pass()) {
            const u32 to = ring + turn.stage * BYTES, barrier = full + 8 * turn.stage;
            wait(empty + 8 * turn.stage, turn.parity ^ 1);
            arrive_and_expect(barrier, BYTES);
            copy_tile(a, to, barrier, k, row_a);
            copy_tile(b, to + A_BYTES, barrier, k, row_b);
        }
    }
}

// Add the product of a step to the sums of 64 rows.
__device__ __forceinline__ void add_step(
    float (&sums)[64], u32 lines_a, u32 lines_b, const float (&of_rows)[2], float of_all, u32 of_columns) {
    float some[64];
    const u64 a = matrix_at(lines_a), b = matrix_at(lines_b);
    begin_products();
#pragma unroll
    for (int i = 0; i < DEEP / 32; ++i) multiply<A_E5M2, B_E5M2>(some, a + 2 * i, b + 2 * i, i > 0);
    end_products();
    const Place place;
#pragma unroll
    for (int eight = 0; eight < 16; ++eight) {
        float of_column[2] = {of_all, of_all};
        if (BLOCKS == 1)
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(of_column[0]), "=f"(of_column[1])
                : "r"(of_columns + 4 * (eight * 8 + place.column)));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int i = eight * 4 + j;
            sums[i] = BLOCKS ? fmaf(some[i], of_rows[j / 2] * of_column[j % 2], sums[i]) : sums[i] + some[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) grouped(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, u16* out, const int* ends, Scales of_a,
    Scales of_b, Sizes sizes) {
    wait_for_the_one_before();
    extern __shared__ u8 memory[];
    const u32 ring = (in_shared(memory) + 1023) / 1024 * 1024, full = ring + STAGES * BYTES, empty = full + 8 * STAGES;
    const u32 factors = empty + 8 * STAGES;  // of columns: 128, two sets for each warpgroup
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, 8);
        publish_barriers();
    }
    __syncthreads();
    Tiles tiles(ends, sizes);
    if (threadIdx.x < GROUP) {
        fewer_registers<40>();
        if (threadIdx.x == 0) copy_steps(a, b, tiles, sizes, ring, full, empty);
        return;
    }
    more_registers<232>();
    const Place place;
    const int half = threadIdx.x / GROUP - 1, own = half * (TALL / 2);
    Tile tile;
    Turn turn;
    int set = 0;  // of factors
    while (tiles.next(tile)) {
        float sums[PARTS][64];
#pragma unroll
        for (int i = 0; i < PARTS * 64; ++i) sums[i / 64][i % 64] = 0;
        const int last = last_of(tile, sizes), down = tile.down + own, columns = (int)sizes.wide - tile.across;
        const int rows = (COLUMNS ? (int)sizes.tall : tile.end - tile.begin) - down;
        const float* scale_a = of_a.first + of_a.group * tile.group + of_a.line * (COLUMNS ? down : tile.begin + down);
        const float* scale_b = of_b.first + of_b.group * tile.group + of_b.line * (tile.across / (BLOCKS ? BLOCKS : 1));
        const int own_column = threadIdx.x % GROUP;
        auto factor_of_column = [&](int k) {
            return own_column < columns && k < last ? scale_b[of_b.line * own_column + of_b.step * (k / DEEP)] : 0;
        };
        float next_factor = BLOCKS == 1 ? factor_of_column(first_of(tile)) : 0;
#pragma unroll 1
        for (int k = first_of(tile); k < last; k += DEEP, turn.pass()) {
            const u32 lines_a = ring + turn.stage * BYTES + own * DEEP, lines_b = ring + turn.stage * BYTES + A_BYTES;
            const i64 step_a = of_a.step * (k / DEEP);
            float of_rows[PARTS][2], of_all = 1;
            if (BLOCKS) {
#pragma unroll
                for (int i = 0; i < 2 * PARTS; ++i) {
                    const int line = place.row + i / 2 * 64 + i % 2 * 8;
                    of_rows[i / 2][i % 2] = line < rows ? scale_a[of_a.line * line + step_a] : 0;
                }
            }
            if (BLOCKS == 128) of_all = scale_b[of_b.step * (k / DEEP)];
            const u32 own_factors = factors + 4 * WIDE * (2 * half + set);
            if (BLOCKS == 1) {  // the other set may be in use yet
                set ^= 1;
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(own_factors + 4 * own_column), "f"(next_factor) : "memory");
                next_factor = factor_of_column(k + DEEP);
                wait_for_warpgroup(half);
            }
            wait(full + 8 * turn.stage, turn.parity);
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                add_step(sums[i], lines_a + i * 64 * DEEP, lines_b, of_rows[i], of_all, own_factors);
            if (threadIdx.x % 32 == 0) arrive(empty + 8 * turn.stage);
        }
        u16* to = out + (COLUMNS ? tile.group * sizes.tall + down : (i64)tile.begin + down) * sizes.wide + tile.across;
        auto part = [&](int i) {
            const i64 below = i * 64;
            write(
                sums[i], to + below * sizes.wide, scale_a + of_a.line * below, of_a.line, scale_b, of_b.line,
                rows - i * 64, columns, sizes.wide);
        };
        part(0);
        if constexpr (PARTS == 2) part(1);
    }
}
