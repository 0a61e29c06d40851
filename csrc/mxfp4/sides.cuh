// MXFP4: the row operand and the column operand of a tile.
//
// A null pointer leaves its part out: without data only the amaxes are measured. An amax that is given takes the place
// of the block's own, which LPQ_STATS allows for. Exponents lie column by column: the exponents of a block of all lines together.
//
// EXACT: what the operand stands for, in the basis in which it is stored, goes out in place of it, in bf16, of a matrix whose
// sizes are multiples of 16. In sections a rotated operand is zero behind the last row.
#pragma once
#include "decode.cuh"
#include "e2m1.cuh"
#include "e8m0.cuh"
#include "philox.cuh"
#include "rotation.cuh"
#include "side.cuh"
#include "transposed.cuh"

namespace mxfp4 {

// The rule of scales: what is added to the bits of an amax before its exponent is taken.
enum Rule { FLOOR = 0, EVEN = 0x200000, CEIL = 0x3fffff };

struct Parameters {
    u8 *data, *scale;
    const float* given;
    float* measured;
    const u64* seed;
    i64 offset;
};

// Registers of a thread: a busy one keeps more than its elements.
template <bool BUSY>
constexpr int needs = LPQ_INPUT == LPQ_FP32 ? 255 : BUSY && REGISTERS < 80 ? 80 : REGISTERS;

// How the lines of a thread are encoded, and where their exponents go.
template <int RULE, bool STOCHASTIC>
struct Lines {
    static constexpr How SHORT_CUT = STOCHASTIC ? SHORT : TIES;  // powers of two take many elements to ties
    float inverse[8];

    // See `scales`.
    template <class Exponents, class Amax>
    __device__ __forceinline__ bool find(
        const Amax& amax, const Parameters& p, bool first, int count, i64 begin, i64 block, i64 blocks,
        Exponents& exponents, int in_tile, int line
    ) {
        const auto exponent_of = [](float a) {
            const u32 bits = __float_as_uint(a), exponent = (bits + RULE) >> 23;
            return bits >= INF ? 255u : max(exponent, 2u) - 2;
        };
        scales<false>(amax, exponent_of, p, first, count, begin, block, blocks, exponents, in_tile, line, inverse);
        bool plain = true;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            plain = plain && inverse[i] >= 1.9259299e-34f;  // 2^-112: times 2^-14 it is exact
#ifdef LPQ_STATS
            plain = plain && (STOCHASTIC ? amax(i) <= __uint_as_float(INF)
                                         : __fmul_rn(amax(i), inverse[i]) < (RULE == FLOOR ? 8.0f : 7.0f));
#endif
        }
        return __all_sync(~0u, plain);
    }

    // The codes of eight elements of line i.
    template <bool SHORTER>
    __device__ __forceinline__ u32 codes(int i, const float (&v)[8], uint2 bits) const {
        return ::encode<STOCHASTIC, SHORTER ? SHORT_CUT : ANY, RULE == FLOOR>(v, inverse[i], bits);
    }

    // Their values.
    __device__ __forceinline__ void decode(int i, u32 codes, float (&v)[8]) const {
        const float power = power_of(inverse[i]);
        decode_e2m1(codes, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j] * 16384.0f, power);
    }
};

__device__ __forceinline__ uint4 narrowed(const float (&v)[8]) {
    return make_uint4(narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7]));
}

template <int RULE, bool STOCHASTIC, bool EXACT = false>
struct Row : Side {
    typedef mxfp4::Parameters Parameters;
    static constexpr bool WAITS = false;
    static constexpr int NEEDS = needs<(STOCHASTIC && EXACT)>, ACROSS = WIDE / 32;  // blocks in a tile
    struct Shared {
        ByColumns<ACROSS, TALL> exponents;
    };
    const Parameters p;
    Shared& shared;
    const i64 blocks;

    __device__ __forceinline__ Row(const Parameters& p, Shared& shared, const Tile& t)
        : p(p), shared(shared), blocks((t.cols + 31) / 32) {}

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        u32 amax[LINES];
        row_amax(w, amax);
        reduce_lanes<1, 2>(amax);
        Lines<RULE, STOCHASTIC> lines;
        const bool plain = lines.find([&](int i) { return value(amax, i); }, p, t.lane_col % 32 == 0, t.high, t.row,
                                      t.col / 32, blocks, shared.exponents, t.lane_col / 32, t.lane_row);
        if (!p.data) return;
        if (plain)
            write<true>(t, w, lines);
        else
            write<false>(t, w, lines);
    }

    template <bool SHORTER>
    __device__ __forceinline__ void write(
        const Tile& t, const u32 (&w)[ROWS][WORDS], const Lines<RULE, STOCHASTIC>& lines
    ) {
        const u32 mask = nibbles(t.wide);
        const bool inside = WHOLE || (EXACT ? t.col < t.cols : t.col / 32 < blocks);
        const i64 apart = EXACT ? t.cols * 2 : blocks * 16;
        u8* to = p.data + t.row * apart + (EXACT ? t.col * 2 : t.col / 2);
        uint2 bits[4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i, to += apart) {
            if (STOCHASTIC && i % 4 == 0)
                draw((u32)(t.col / 16), (u32)(p.offset + t.place()) + i, 0, p.seed[t.section()], t.lane_col & 8, 1, bits);
            u32 words[WORDS];
#pragma unroll
            for (int j = 0; j < WORDS; ++j) words[j] = w[i][j];
            keep_apart(words);
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = value(words, j);
            const u32 codes = lines.template codes<SHORTER>(i, v, bits[i % 4]) & mask;
            if constexpr (EXACT) {
                lines.decode(i, codes, v);
                if (i < t.high && inside) stream(to, narrowed(v));
            } else {
                if (i < t.high && inside) stream(to, codes);
            }
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        if (EXACT || !p.data) return;
        shared.exponents.store(
            threadIdx.x, p.scale, t.begin() + (i64)t.down * TALL, t.end(), t.rows, (i64)t.across * ACROSS, blocks);
    }
};

// The codes of a column operand, or its values, on their way.
template <bool EXACT>
struct OnTheWay : TransposedNibbles {};
template <>
struct OnTheWay<true> : TransposedValues {};

template <int RULE, bool STOCHASTIC, bool ROTATED, bool EXACT = false>
struct Col : Side {
    typedef mxfp4::Parameters Parameters;
    static constexpr int NEEDS = needs<(ROTATED || (STOCHASTIC && EXACT))>, DOWN = TALL / 32;
    static_assert(halves_are_16_apart<ROTATED>, "tiles are too wide");
    struct Shared {
        ByColumns<DOWN, WIDE> exponents;
        OnTheWay<EXACT> out;
        Columns columns;
    };
    const Parameters p;
    Shared& shared;
    const i64 blocks;
    u32 amax[WORDS];  // of rotated columns in bf16, or for inputs in fp32 in fp32

    __device__ __forceinline__ Col(const Parameters& p, Shared& shared, const Tile& t)
        : p(p), shared(shared), blocks(((IN_SECTIONS ? t.line() : t.rows) + 31) / 32) {}

    __device__ __forceinline__ void find(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (ROTATED)
            rotated_amax(t, w, amax);
        else
            col_amax(w, amax);
        reduce_rows(amax);
        shared.columns.put(t, amax);
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
#pragma unroll
        for (int k = 1; k < 32 / WARP_ROWS; ++k)  // the other rows of a block
            shared.columns.merge(t, threadIdx.x / 32 ^ k, amax);
        const auto amax_of = [&](int j) {
            if (!ROTATED || PER_WORD == 1) return value(amax, j);
            return __uint_as_float(j & 1 ? amax[j / 2] & 0xffff0000u : amax[j / 2] << 16);
        };
        Lines<RULE, STOCHASTIC> lines;
        const bool plain = lines.find(amax_of, p, t.lane_row % 32 == 0, t.wide, t.col, t.place() / 32, blocks,
                                      shared.exponents, t.lane_row / 32, t.lane_col);
        u32 y[8][4];
        if (ROTATED) rotate(t, w, y);
        if (!p.data) return;
        if (plain)
            write<true>(t, w, y, lines);
        else
            write<false>(t, w, y, lines);
    }

    template <bool SHORTER>
    __device__ __forceinline__ void write(
        const Tile& t, const u32 (&w)[ROWS][WORDS], const u32 (&y)[8][4], const Lines<RULE, STOCHASTIC>& lines
    ) {
        const i64 count = t.end() - t.begin(), group = t.place() / 16 * 16;
        const bool cut = group + 16 > count;  // of a whole warp
        const u32 mask = !ROTATED ? nibbles(t.high) : group < count ? ~0u : 0;  // what pads the rows was rotated with them
        uint2 bits[4] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (STOCHASTIC && j % 4 == 0)
                draw((u32)((p.offset + t.place()) / 16), (u32)t.col + j, 1, p.seed[t.section()], t.lane_row & 8, 16, bits);
            float v[8];
            column_of<ROTATED, true>(w, y, j, v);
            const u32 codes = lines.template codes<SHORTER>(j, v, bits[j % 4]) & mask;
            if constexpr (EXACT) {
                lines.decode(j, codes, v);
                if (ROTATED && IN_SECTIONS && cut) {
                    hadamard16(t.lane_row & 8, v);
#pragma unroll
                    for (int i = 0; i < 8; ++i) v[i] = i < t.high ? v[i] : 0.0f;
                    hadamard16(t.lane_row & 8, v);
                }
                shared.out.put(t, j, narrowed(v));
            } else {
                shared.out.put(t, j, codes);
            }
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        if (!p.data) return;
        if constexpr (EXACT) {
            shared.out.store(t, p.data);
        } else {
            shared.out.store(t, p.data, 2 * blocks, IN_SECTIONS ? (t.bottom() - t.top() + 31) / 32 * 2 : 2 * blocks);
            const int thread = (int)threadIdx.x - (THREADS - shared.exponents.TAKEN);
            shared.exponents.store(thread, p.scale + t.lines(), (i64)t.across * WIDE, t.cols, t.all_lines(),
                                   t.top() / 32 + (i64)t.down * DOWN, (t.bottom() + 31) / 32);
        }
    }
};

}  // namespace mxfp4
