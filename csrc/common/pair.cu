// Both operands of a tile from one read, each in a format of its own: LPQ_ROW and LPQ_COL are sides (see side.cuh), which
// come from the headers LPQ_ROW_HEADER and LPQ_COL_HEADER.
//
// A block of threads takes several of `count` tiles one after the other, so that what a side does once pays. In sections it
// takes one, as a side does once what is of a section; some of the last ones have none. With LPQ_SEVERAL, of several fp32
// matrices, each is a stack of one: a block takes one tile of the matrix that a table has for it.
#include "both.cuh"
#ifdef LPQ_SEVERAL
#include "table.cuh"
#endif
#include LPQ_ROW_HEADER
#include LPQ_COL_HEADER

typedef LPQ_ROW RowSide;
typedef LPQ_COL ColSide;
constexpr int BOTH_NEED = RowSide::NEEDS > ColSide::NEEDS ? RowSide::NEEDS : ColSide::NEEDS;
// Where a tile lies in its section takes registers, too.
constexpr int NEEDS = IN_SECTIONS && !WHOLE && BOTH_NEED < 80 && TALL <= UNIT ? 80 : BOTH_NEED;

struct SharedByBoth {
    RowSide::Shared row;
    ColSide::Shared col;
};

#ifdef LPQ_SEVERAL
// As lpq.operations.several_sides passes it: 8 bytes for each field.
struct Matrix {
    const void* x;
    RowSide::Parameters of_row;
    ColSide::Parameters of_col;
    i64 rows, cols;
    i64 first;
};

extern "C" __global__ void __launch_bounds__(THREADS, fitting<NEEDS>) pair_several(const Matrix* table, i64 count) {
    wait_for_the_one_before();
    const Matrix m = line_here(table, count);
    const Sections one = {nullptr, 1, m.rows, 1, m.rows};
    const Tile t(one, m.rows, m.cols, (u32)(blockIdx.x - m.first));
    u32 w[ROWS][WORDS];
    load(t, m.x, w);
    SharedByBoth& shared = in_shared_memory<SharedByBoth>();
    RowSide row(m.of_row, shared.row, t);
    ColSide col(m.of_col, shared.col, t);
    encode_tile(t, w, row, col, m.of_row.data);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, fitting<NEEDS>) pair(
    const void* x, const RowSide::Parameters of_row, const ColSide::Parameters of_col,
#ifdef LPQ_SECTIONS
    const Sections sections,
#endif
    u32 count, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    // Backwards: what was read last to measure the tensor may still be in the cache.
#ifdef LPQ_SECTIONS
    Tile t(sections, rows, cols, count - 1 - blockIdx.x);
    if (t.section() == sections.count) return;
#else
    Tile t(rows, cols, count - 1 - blockIdx.x);
#endif
    u32 w[ROWS][WORDS];
    load(t, x, w);
    SharedByBoth& shared = in_shared_memory<SharedByBoth>();
    RowSide row(of_row, shared.row, t);
    ColSide col(of_col, shared.col, t);
    for (u32 index = blockIdx.x;;) {
        encode_tile(t, w, row, col, of_row.data);
        if (IN_SECTIONS) break;
        index += gridDim.x;
        if (index >= count) break;
        if (!RowSide::WAITS) __syncthreads();  // the next encode writes what this store reads
        t = Tile(rows, cols, count - 1 - index);
        load(t, x, w);
    }
}
#endif
