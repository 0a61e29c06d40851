// NVFP4: the row operand of a matrix whose rows have an amax each, from one read. A block of threads holds whole rows while it
// finds their amaxes, and then encodes them.
//
// LPQ_ROW: one more than the way the operand is encoded. LPQ_STATS: amaxes of blocks are given or wanted. LPQ_HELD: how many
// tiles a thread keeps in shared memory.
//
// A warp takes tiles of 8 rows and 256 columns. `abreast` warps, a power of two, share out 8 rows: each takes every `abreast`-th
// tile of these, LPQ_HELD + 1 in all or one less. The last of them stays in registers.
#include "options.cuh"
#include "sides.cuh"

typedef nvfp4::Row<LPQ_ROW - 1, false> Row;
static_assert(WARP_ROWS == ROWS && !ROW_MAJOR && !IN_SECTIONS, "a warp has eight rows, whose scales lie side by side");

// Registers of a thread: where a block holds three tiles, a multiprocessor has shared memory for two blocks only.
constexpr int NEEDS = LPQ_HELD > 2 && Row::NEEDS < 128 ? 128 : Row::NEEDS;

// The tiles that each thread has read, except its last one. A thread takes only tiles that it put there.
struct Held {
    static constexpr bool USED = LPQ_HELD > 0;
    uint4 words[USED ? LPQ_HELD : 1][USED ? ROWS : 1][WORDS / 4][USED ? THREADS : 1];

    __device__ __forceinline__ void put(int tile, const u32 (&w)[ROWS][WORDS]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < WORDS; j += 4)
                words[tile][i][j / 4][threadIdx.x] = make_uint4(w[i][j], w[i][j + 1], w[i][j + 2], w[i][j + 3]);
    }
    __device__ __forceinline__ void take(int tile, u32 (&w)[ROWS][WORDS]) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < WORDS; j += 4) {
                const uint4 v = words[tile][i][j / 4][threadIdx.x];
                w[i][j] = v.x, w[i][j + 1] = v.y, w[i][j + 2] = v.z, w[i][j + 3] = v.w;
            }
    }
};

// amaxes: the memory that p.amaxes reads, which is written here.
extern "C" __global__ void __launch_bounds__(THREADS, fitting<NEEDS>) quantize_rows(
    const void* x, u32* amaxes, const nvfp4::Parameters p, u32 abreast, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    __shared__ Row::Shared row_shared;
    __shared__ u32 largest[WARPS][ROWS];
    Held& held = in_shared_memory<Held>();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, strips = WARPS / abreast;
    const i64 top = (i64)blockIdx.x * strips * ROWS;
    Tile t(rows, cols, 0);
    u32 w[ROWS][WORDS], amax[LINES] = {};
    // The first column of the warp's tile of this number.
    const auto column = [&](int tile) { return (int)(tile * abreast + warp % abreast) * WIDE; };

#pragma unroll 1
    for (int k = 0; k <= LPQ_HELD; ++k) {
        if (column(k) >= cols) break;
        t.go_to(top + warp / abreast * ROWS, column(k) + t.lane_col);
        load(t, x, w);
        u32 own[LINES];
        row_amax(w, own);
#pragma unroll
        for (int i = 0; i < LINES; ++i) amax[i] = larger(amax[i], own[i]);
        if (k < LPQ_HELD) held.put(k, w);
    }
    reduce_lanes<1, 16>(amax);
    if (lane == 0)
#pragma unroll
        for (int i = 0; i < ROWS; ++i) largest[warp][i] = amax_bits(value(amax, i));
    __syncthreads();
    if (threadIdx.x < strips * ROWS && top + threadIdx.x < rows) {
        u32 bits = 0;
        for (u32 k = 0; k < abreast; ++k) bits = max(bits, largest[threadIdx.x / ROWS * abreast + k][threadIdx.x % ROWS]);
        amaxes[top + threadIdx.x] = bits;
    }
    __syncthreads();

    Row row(p, row_shared, t);
#pragma unroll 1
    for (int k = LPQ_HELD;; --k) {
        if (column(k) < cols) {
            t.go_to(t.row, column(k) + t.lane_col);
            row.encode(t, w);
            __syncwarp();
            const int block = column(k) / 16 + lane;
            if (lane < nvfp4::ACROSS && block < row.across)
                store_bytes<ROWS>(p.scale + block * rows, t.row, rows, &row_shared.codes.bytes[lane][t.lane_row]);
            __syncwarp();
        }
        if (k == 0) break;
        held.take(k - 1, w);
    }
}
