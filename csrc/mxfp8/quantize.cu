// MXFP8: both operands of a tile from one read. LPQ_ROW, LPQ_COL: E4M3 or E5M2 where the operand is wanted.
#include "sides.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, fitting<REGISTERS>) quantize(
    const void* x, u8* row_data, u8* row_scale, u8* col_data, u8* col_scale, const float* row_given,
    const float* col_given, float* row_measured, float* col_measured, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    u32 w[ROWS][WORDS];
    load(t, x, w);
    struct Shared {
#ifdef LPQ_ROW
        mxfp8::Row<LPQ_ROW>::Shared row;
#endif
#ifdef LPQ_COL
        mxfp8::Col<LPQ_COL>::Shared col;
#endif
    };
    Shared& shared = in_shared_memory<Shared>();
#ifdef LPQ_COL
    mxfp8::Col<LPQ_COL> col({col_data, col_scale, col_given, col_measured}, shared.col, t);
    col.find(t, w);
#endif
#ifdef LPQ_ROW
    mxfp8::Row<LPQ_ROW> row({row_data, row_scale, row_given, row_measured}, shared.row, t);
    row.encode(t, w);
#endif
#ifdef LPQ_COL
    __syncthreads();
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
