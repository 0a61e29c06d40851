// MXFP8: the row operand and the column operand of a tile.
//
// A null pointer leaves its part out: without data only the amaxes are measured. An amax that is given takes the place
// of the block's own, which LPQ_STATS allows for. If there are `words`, the exponents go there: see untile.cu.
//
// EXACT: what the operand stands for goes out in place of it, in bf16, of a matrix whose sizes are multiples of 8.
#pragma once
#include "decode.cuh"
#include "side.cuh"

namespace mxfp8 {

struct Parameters {
    u8 *data, *scale;
    const float* given;
    float* measured;
    u32* words;
};

// The exponent byte of a block: the least power of two that brings its amax into range; 255 unless it is finite.
template <class F>
__device__ __forceinline__ u32 exponent_of(float amax) {
    const u32 bits = __float_as_uint(__fmul_rn(amax, (float)(1.0 / (F::mantissa == 3 ? 448.0 : 57344.0))));
    return bits <= 0x400000u ? 0 : min((bits + 0x7fffffu) >> 23, 255u);
}

// 2^(127 - exponent).
__device__ __forceinline__ float inverse_of(u32 exponent) {
    return __uint_as_float(exponent < 254 ? (254 - exponent) << 23 : exponent == 254 ? 0x400000u : 0x200000u);
}

// 2^(exponent - 127), or NaN, from what inverse_of gives.
__device__ __forceinline__ float power_of(float inverse) {
    const u32 bits = __float_as_uint(inverse), exponent = bits >> 23 ? 254 - (bits >> 23) : 254;
    return __uint_as_float(bits == 0x200000u ? NAN_BITS : exponent ? exponent << 23 : 0x400000u);
}

// Eight elements times a power of two.
template <class F>
__device__ __forceinline__ void store_exact(void* out, i64 row, i64 col, i64 cols, u32 low, u32 high, float power) {
    float v[8];
    decode_pairs<F>(low, v[0], v[1], v[2], v[3]), decode_pairs<F>(high, v[4], v[5], v[6], v[7]);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], power);
    store_values(out, row, col, cols, v);
}

// Scales of blocks in N lines: their exponents go to shared memory, `apart` bytes from line to line, and where the
// statistics live is read or written.
template <class F, int N, int WORDS_OF_N>
__device__ __forceinline__ void scales(
    const u32 (&amax)[WORDS_OF_N], const Parameters& p, bool first, int count, i64 begin, i64 block, i64 blocks,
    u8* exponents, int apart, float (&inverse)[N]
) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float a = value(amax, i);
#ifdef LPQ_STATS
        const bool inside = i < count && block < blocks;
        if (p.measured && first && inside) p.measured[(begin + i) * blocks + block] = __uint_as_float(amax_bits(a));
        if (p.given) a = inside ? p.given[(begin + i) * blocks + block] : 0.0f;
#endif
        const u32 exponent = exponent_of<F>(a);
        inverse[i] = inverse_of(exponent);
        if (first) exponents[i * apart] = (u8)exponent;
    }
}

template <class F, bool EXACT = false>
struct Row : Side {
    typedef mxfp8::Parameters Parameters;
    static constexpr int ACROSS = WIDE / 32;  // blocks in a tile
    struct Shared {
        alignas(4) u8 exponents[TALL][ACROSS];
    };
    const Parameters p;
    Shared& shared;
    const i64 blocks;

    __device__ __forceinline__ Row(const Parameters& p, Shared& shared, const Tile& t)
        : p(p), shared(shared), blocks((t.cols + 31) / 32) {}

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        u32 amax[LINES];
        float inverse[ROWS];
        row_amax(w, amax);
        reduce_lanes<1, 2>(amax);
        scales<F>(amax, p, t.lane_col % 32 == 0, t.high, t.row, t.col / 32, blocks,
                  &shared.exponents[t.lane_row][t.lane_col / 32], ACROSS, inverse);
        if (!p.data) return;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            u32 low, high;
            scale_row<F>(w[i], inverse[i], low, high);
            if (!EXACT)
                store_row(t, p.data, i, low, high);
            else if (i < t.high)
                store_exact<F>(p.data, t.row + i, t.col, t.cols, low, high, power_of(inverse[i]));
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        if (EXACT) return;
        const u8* exponents = shared.exponents[threadIdx.x % TALL];
        const i64 row = (i64)t.down * TALL + threadIdx.x;
        if (threadIdx.x >= TALL) return;
        if (WHOLE && p.words)
            store_piece(word_of(t, p.words, threadIdx.x / WIDE, threadIdx.x % WIDE), *(const u32*)exponents);
        else if (p.data && row < t.rows)
            store_bytes<ACROSS>(p.scale + row * blocks, (i64)t.across * ACROSS, blocks, exponents);
    }
};

template <class F, bool EXACT = false>
struct Col : Side {
    typedef mxfp8::Parameters Parameters;
    static constexpr int DOWN = TALL / 32;
    struct Shared {
        Skewed<WIDE, DOWN> exponents;
        Transposed transposed;
        Columns columns;
    };
    const Parameters p;
    Shared& shared;
    const i64 blocks;
    u32 amax[WORDS];

    __device__ __forceinline__ Col(const Parameters& p, Shared& shared, const Tile& t)
        : p(p), shared(shared), blocks((t.rows + 31) / 32) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        col_amax(w, amax);
        reduce_lanes<16, 16>(amax);
        shared.columns.put(t, amax);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        float inverse[8];
        shared.columns.merge(t, threadIdx.x / 32 ^ 1, amax);  // the other 16 rows of a block
        scales<F>(amax, p, t.lane_row % 32 == 0, t.wide, t.col, t.row / 32, blocks,
                  &shared.exponents[t.lane_col][t.lane_row / 32], DOWN, inverse);
        if (!p.data) return;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u32 low, high;
            scale_col<F>(w, j, inverse[j], low, high);
            if (!EXACT)
                shared.transposed.put(t, j, low, high);
            else if (j < t.wide)
                store_exact<F>(p.data, t.col + j, t.row, t.rows, low, high, power_of(inverse[j]));
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        if (EXACT || !p.data) return;
        shared.transposed.store(t, p.data);
        const int line = (int)threadIdx.x - (THREADS - WIDE), place = (int)threadIdx.x - (THREADS - TALL);
        const i64 col = (i64)t.across * WIDE + line;
        if (WHOLE && p.words) {
            if (place >= 0)
                store_piece(word_of(t, p.words, place / WIDE, WIDE + place % WIDE),
                            *(const u32*)&shared.exponents[place % WIDE][place / WIDE * 4]);
        } else if (line >= 0 && col < t.cols) {
            store_bytes<DOWN>(p.scale + col * blocks, (i64)t.down * DOWN, blocks, shared.exponents[line]);
        }
    }
};

}  // namespace mxfp8
