// FP8 with one scale for the matrix or, if SQUARE, for each 128 x 128 block: the row and the column operand of a tile.
//
// Without SQUARE the amax is the largest of `amaxes` (count of them), which goes to `known` if that is wanted, and
// `measured`, which must be 0 before, gets the amax of the matrix. With it, `amaxes` are those of the blocks, or null
// to use the blocks' own, which go to `measured` if that is wanted.
#pragma once
#include "scale.cuh"
#include "side.cuh"

namespace fp8 {

struct Matrix {
    u8* data;
    float* scale;
    const u32* amaxes;
    alignas(8) u32 count;
    u32 *known, *measured;
    alignas(8) float largest_scale;
    alignas(8) u32 pow2;
};

// Where the scale of this thread's elements belongs, in the row operand and in the column operand, and who writes it.
template <bool SQUARE>
struct Place {
    i64 in_row, in_col;
    bool inside, writes;

    __device__ __forceinline__ Place(const Tile& t) {
        const i64 down = t.row / WIDE, across = t.across;
        in_row = SQUARE ? down * ((t.cols + WIDE - 1) / WIDE) + across : 0;
        in_col = SQUARE ? across * ((t.rows + WIDE - 1) / WIDE) + down : 0;
        inside = !SQUARE || down * WIDE < t.rows;
        writes = SQUARE ? inside && threadIdx.x % WIDE_THREADS == 0 : blockIdx.x == 0 && threadIdx.x == 0;
    }
    static constexpr int WIDE_THREADS = WIDE / WARP_ROWS * 32;  // of a square
};

// The scale of this thread's elements; `place` is where its statistic is. All threads of the block call this.
template <class F, bool SQUARE>
__device__ __forceinline__ float tile_scale(
    const Matrix& p, const u32 (&w)[ROWS][WORDS], const Place<SQUARE>& at, i64 place
) {
    u32 amax = 0;
    if (SQUARE) {
        if (p.measured || !p.amaxes) amax = group_max(thread_amax(w), WIDE / WARP_ROWS);
        if (p.measured && at.writes) p.measured[place] = amax;
        if (p.amaxes) amax = at.inside ? p.amaxes[place] : 0;
    } else {
        amax = largest_of(p.amaxes, p.count);
        if (at.writes && p.known) *p.known = amax;
        if (p.measured) {  // few tiles have a larger one than was found before
            const u32 own = block_max(thread_amax(w));
            if (threadIdx.x == 0 && own > *(volatile u32*)p.measured) atomicMax(p.measured, own);
        }
    }
    return scale_from_amax(amax, largest_value<F>(), p.largest_scale, p.pow2);
}

template <class F, bool SQUARE>
struct RowMatrix : Side {
    typedef Matrix Parameters;
    struct Shared {};
    const Matrix p;
    float factor;

    __device__ __forceinline__ RowMatrix(const Matrix& p, Shared&, const Tile&) : p(p) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        const Place<SQUARE> at(t);
        factor = tile_scale<F>(p, w, at, at.in_row);
        if (at.writes) p.scale[at.in_row] = __frcp_rn(factor);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            u32 low, high;
            scale_row<F>(w[i], factor, low, high);
            store_row(t, p.data, i, low, high);
        }
    }
};

template <class F, bool SQUARE>
struct ColMatrix : Side {
    typedef Matrix Parameters;
    struct Shared {
        Transposed transposed;
    };
    const Matrix p;
    Shared& shared;
    float factor;

    __device__ __forceinline__ ColMatrix(const Matrix& p, Shared& shared, const Tile&) : p(p), shared(shared) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        const Place<SQUARE> at(t);
        factor = tile_scale<F>(p, w, at, at.in_col);
        if (at.writes) p.scale[at.in_col] = __frcp_rn(factor);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        u32 low[ROWS], high[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) scale_row<F>(w[i], factor, low[i], high[i]);
        shared.transposed.put_rows(t, low, high);
    }

    __device__ __forceinline__ void store(const Tile& t) { shared.transposed.store(t, p.data); }
};

}  // namespace fp8
