// NVFP4: both operands of a tile from one read.
//
// LPQ_ROW, LPQ_COL: the operands that are wanted, and one more than the way they are encoded. LPQ_SQUARE: blocks of
// 16x16 in place of 1x16. LPQ_ROTATED: the column operand is rotated. LPQ_SHARED: it has the row operand's codes.
// LPQ_STATS: amaxes of blocks are given or wanted.
//
// A block of threads takes several of `count` tiles one after the other, since to find the factors that it looks up
// takes as long as a tenth of a tile. For both operands it fetches the next tile while it works on one.
#include "nibbles.cuh"
#include "options.cuh"
#include "sides.cuh"

#if defined(LPQ_ROW) && (defined(LPQ_COL) || defined(LPQ_SHARED))
constexpr bool FETCHES = true;
#else
constexpr bool FETCHES = false;
#endif

#ifdef LPQ_ROW
typedef nvfp4::Row<LPQ_ROW - 1, SQUARE, SHARED> Row;
constexpr int ROW_NEEDS = Row::NEEDS;
#else
constexpr int ROW_NEEDS = 0;
#endif
#ifdef LPQ_COL
typedef nvfp4::Col<LPQ_COL - 1, SQUARE, ROTATED> Col;
constexpr int COL_NEEDS = Col::NEEDS;
#else
constexpr int COL_NEEDS = 0;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, fitting<(ROW_NEEDS > COL_NEEDS ? ROW_NEEDS : COL_NEEDS)>) quantize(
    const void* x, u8* row_data, u8* row_scale, u32* row_amax_out, u8* col_data, u8* col_scale, u32* col_amax_out,
    const u32* row_amaxes, u32 row_count, const float* row_given, float* row_measured, const u32* col_amaxes,
    u32 col_count, const float* col_given, float* col_measured, const u64* seed, i64 offset, u32 count, i64 rows,
    i64 cols
) {
    wait_for_the_one_before();
    Tile t(rows, cols, count - 1 - blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
#ifdef LPQ_ROW
    __shared__ Row::Shared row_shared;
    Row row({row_data, row_scale, row_amax_out, row_amaxes, row_count, row_given, row_measured, seed, offset},
            row_shared, t);
#endif
#if defined(LPQ_SHARED)
    __shared__ nvfp4::Columns16<SQUARE> columns;
    if (blockIdx.x == 0 && threadIdx.x == 0 && col_data) *col_amax_out = *row_amax_out;
#elif defined(LPQ_COL)
    __shared__ Col::Shared col_shared;
    Col col({col_data, col_scale, col_amax_out, col_amaxes, col_count, col_given, col_measured, seed, offset},
            col_shared, t);
#endif
    __shared__ Ahead<FETCHES> ahead;
    for (u32 index = blockIdx.x;;) {
        const u32 next = index + gridDim.x;
        __syncthreads();
        if (next < count) ahead.fetch(Tile(rows, cols, count - 1 - next), x);
#ifdef LPQ_ROW
        row.encode(t, w);
#endif
#if defined(LPQ_SHARED)
        __syncwarp();  // all threads of a block, which are in one warp, have written its scale
        if (t.lane_row % 16 == 0 && t.lane_col % 16 == 0)
            columns.codes[t.lane_col / 16][t.lane_row / 16] = row_shared.codes[t.lane_row / 16][t.lane_col / 16];
        transpose_8x8(row.kept);
#pragma unroll
        for (int j = 0; j < 8; ++j) columns.put(t, j, row.kept[j]);
#elif defined(LPQ_COL)
#pragma unroll
        for (int i = 0; i < ROWS; ++i) keep_apart(w[i]);
        col.encode(t, w);
#endif
        __syncthreads();
#ifdef LPQ_ROW
        row.store(t);
#endif
#if defined(LPQ_SHARED)
        columns.store(t, col_data, col_scale, row.across, row.down);
#elif defined(LPQ_COL)
        col.store(t);
#endif
        if (next >= count) break;
        index = next;
        t = Tile(rows, cols, count - 1 - index);
        ahead.take(t, x, w);
    }
}
