// The column operand of a matrix, made of its row operand: LPQ_READER, of LPQ_READER_HEADER, gives what the row operand's
// codes stand for in fp32, and LPQ_COL, of LPQ_COL_HEADER, is a side that needs nothing else (see side.cuh).
#include "side.cuh"
#include LPQ_READER_HEADER
#include LPQ_COL_HEADER

typedef LPQ_READER Reader;
typedef LPQ_COL ColSide;

// A reader holds no line of the input beside its codes, so fewer registers suffice than the side needs in a pair.
constexpr int NEEDED = ColSide::NEEDS < 80 ? ColSide::NEEDS : 80;

extern "C" __global__ void __launch_bounds__(THREADS, fitting<NEEDED>) recode(
    const Reader reader, const ColSide::Parameters of_col, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    const Tile t(rows, cols, blockIdx.x);
    u32 w[ROWS][WORDS] = {};
    reader.each_line(t, [&](int i, const float(&v)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) w[i][j] = j < t.wide ? __float_as_uint(v[j]) : 0;
    });
    ColSide::Shared& shared = in_shared_memory<ColSide::Shared>();
    ColSide col(of_col, shared, t);
    col.find(t, w);
    __syncthreads();
    if (ColSide::SCALES) {
        col.scale(t);
        __syncthreads();
    }
    col.encode(t, w);
    __syncthreads();
    col.store(t);
}
