// MXFP4: both operands of a tile from one read. LPQ_ROW, LPQ_COL: their sides, where the operands are wanted.
#include "sides.cuh"

#ifdef LPQ_ROW
typedef LPQ_ROW RowSide;
constexpr int ROW_NEEDS = RowSide::NEEDS;
#else
constexpr int ROW_NEEDS = 0;
#endif
#ifdef LPQ_COL
typedef LPQ_COL ColSide;
constexpr int COL_NEEDS = ColSide::NEEDS;
#else
constexpr int COL_NEEDS = 0;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, fitting<(ROW_NEEDS > COL_NEEDS ? ROW_NEEDS : COL_NEEDS)>) quantize(
    const void* x, const mxfp4::Parameters of_row, const mxfp4::Parameters of_col, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
    struct Shared {
#ifdef LPQ_ROW
        RowSide::Shared row;
#endif
#ifdef LPQ_COL
        ColSide::Shared col;
#endif
    };
    Shared& shared = in_shared_memory<Shared>();
#ifdef LPQ_COL
    ColSide col(of_col, shared.col, t);
    col.find(t, w);
#endif
#ifdef LPQ_ROW
    RowSide row(of_row, shared.row, t);
    row.encode(t, w);
#endif
#ifdef LPQ_COL
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) keep_apart(w[i]);
    col.encode(t, w);
#endif
    __syncthreads();
#ifdef LPQ_COL
    col.store(t);
#endif
#ifdef LPQ_ROW
    row.store(t);
#endif
}
