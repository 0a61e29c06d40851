// The amax of each row and of each column of a matrix, or of each section; null leaves one out. They must be 0 before.
#include "line_amaxes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, fitting<REGISTERS>) amax(
    const void* x, u32* row_amaxes, u32* col_amaxes,
#ifdef LPQ_SECTIONS
    const Sections sections,
#endif
    i64 rows, i64 cols
) {
    wait_for_the_one_before();
    __shared__ RowAmaxes::Shared of_rows;
    __shared__ ColAmaxes::Shared of_cols;
#ifdef LPQ_SECTIONS
    const Tile t(sections, rows, cols, blockIdx.x);
    if (t.section() == sections.count) return;
#else
    const Tile t(rows, cols, blockIdx.x);
#endif
    u32 w[ROWS][WORDS];
    load(t, x, w);
    RowAmaxes row({row_amaxes}, of_rows, t);
    ColAmaxes col({col_amaxes}, of_cols, t);
    row.find(t, w), col.find(t, w);
    __syncthreads();
    row.store(t), col.store(t);
}
