// NVFP4: the row operand and the column operand of a tile. LPQ_STATS: amaxes of blocks are given or wanted. The scales of
// blocks of 1x16 lie column by column: the scales of one block of all lines together.
//
// EXACT: elements times the scales of their blocks times 2^-11 go out in place of an operand, in bf16, which holds them
// exactly; of a matrix whose sizes are multiples of 8. In sections, what an operand decodes to, rounded to bf16, in the basis in
// which it is stored: each section has an amax and a seed, and is zero behind its last row.
#pragma once
#include "factors.cuh"
#include "line_amaxes.cuh"
#include "philox.cuh"
#include "rotation.cuh"
#include "transposed.cuh"

namespace nvfp4 {

constexpr int ACROSS = WIDE / 16, DOWN = TALL / 16;  // blocks of 16 in a tile
constexpr int DRAWN = 2;       // calls of Philox that share their keys

// Rows of N bytes for LINES_ lines, of which lanes write every eighth: a word is left out for that after eight of them.
template <int LINES_, int N>
struct Skewed {
    alignas(4) u8 bytes[LINES_ * N + LINES_ / 2];

    __device__ __forceinline__ u8* operator[](int line) { return bytes + line * N + line / 8 * 4; }
    __device__ __forceinline__ const u8* operator[](int line) const { return bytes + line * N + line / 8 * 4; }
};

// The scales of a tile of LINES_ x BLOCKS blocks, on their way: of blocks of 16x16 to a matrix that lies row by row.
template <bool SQUARE, int LINES_, int BLOCKS>
struct Codes : ByColumns<BLOCKS, LINES_> {};
template <int LINES_, int BLOCKS>
struct Codes<true, LINES_, BLOCKS> : Skewed<LINES_, BLOCKS> {
    static constexpr int TAKEN = LINES_;

    __device__ __forceinline__ void store(
        int thread, u8* out, i64 first_line, i64 end, i64, i64 first_block, i64 blocks
    ) const {
        const i64 line = first_line + thread;
        if (thread >= 0 && thread < LINES_ && (WHOLE || line < end))
            store_bytes<BLOCKS>(out + line * blocks, first_block, blocks, (*this)[thread]);
    }
};

// Eight exact values of which two are in a word, as what is decoded in a section.
template <int WAY>
__device__ __forceinline__ void decode_exact(const uint4& values, const Parameters& p, i64 amax_at, float (&v)[8]) {
    const float amax = __uint_as_float(operand_amax<WAY>(p.amaxes[amax_at])), shift = amax > 1.0f ? 4096.0f : 1.0f;
    const float first = __fdiv_rn(amax, shift) * 2048.0f, last = __fmul_rn(shift, (float)(1.0 / 2688.0));
    const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float exact = __uint_as_float(i & 1 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
        v[i] = __fmul_rn(__fmul_rn(exact, first), last);
    }
}
__device__ __forceinline__ uint4 narrowed(const float (&v)[8]) {
    return make_uint4(narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7]));
}

// Registers of a thread. Fewer of the busiest threads at a time are faster than more that run short of registers.
template <int WAY, bool EXACT>
constexpr int more = searches<WAY> ? 128 : by_rows<WAY> || (is_stochastic<WAY> && EXACT) ? 80 : 0;
template <int WAY, bool EXACT>
constexpr int needs = LPQ_INPUT == LPQ_FP32 ? 255 : more<WAY, EXACT> > REGISTERS ? more<WAY, EXACT> : REGISTERS;

// KEEPS: the codes of this thread's rows are kept, for a column operand that has the same ones.
template <int WAY, bool SQUARE, bool KEEPS = false, bool EXACT = false>
struct Row : Side {
    static constexpr bool STOCHASTIC = is_stochastic<WAY>;
    typedef nvfp4::Parameters Parameters;
    static_assert(!SQUARE || halves_are_16_apart<SQUARE>, "tiles are too wide");
    static constexpr int NEEDS = needs<WAY, EXACT>, HIGH = SQUARE ? DOWN : TALL;
    struct Shared {
        Codes<SQUARE, HIGH, ACROSS> codes;
        Factors factors;
        Largest largest;
    };
    const Parameters p;
    Shared& shared;
    const i64 across, down;
    const Scales<WAY, SIGNIFICANT> scales;
    u32 kept[ROWS];

    __device__ __forceinline__ Row(const Parameters& p, Shared& shared, const Tile& t)
        : p(p), shared(shared), across((t.cols + 15) / 16), down(((IN_SECTIONS ? t.end() - t.begin() : t.rows) + 15) / 16),
          scales(p, t, shared.factors, shared.largest) {}

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        const i64 row_block = t.place() / 16, col_block = t.col / 16;
        float factor[ROWS];
        u32 code_of[ROWS];
        const auto elements = [&](int i, float (&v)[8]) {
            u32 words[WORDS];
#pragma unroll
            for (int j = 0; j < WORDS; ++j) words[j] = w[i][j];
            keep_apart(words);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = value(words, j);
        };
        How how;
        if constexpr (SQUARE) {
            u32 block = thread_amax(w);
            block = max(block, __shfl_xor_sync(~0u, block, 1)), block = max(block, __shfl_xor_sync(~0u, block, 16));
            how = square_factors<WAY>(
                __uint_as_float(block), p, scales, shared.factors, t.lane_row % 16 == 0 && t.lane_col % 16 == 0,
                row_block * across + col_block, row_block < down && col_block < across,
                &shared.codes[t.lane_row / 16][t.lane_col / 16], factor, code_of, elements);
        } else {
            u32 words[LINES];
            float amaxes[ROWS];
            row_amax(w, words);
            reduce_lanes<1, 1>(words);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) amaxes[i] = value(words, i);
            how = line_factors<WAY, 1>(
                amaxes, p, scales, shared.factors, t.lane_col & 8, col_block < across ? t.high : 0, t.row, col_block,
                across, t.row, t.col == 0, shared.codes, t.lane_col / 16, t.lane_row, factor, code_of, elements);
        }
        if (!p.data) return;
        if (how == SHORT)
            write<SHORT>(t, w, factor, code_of);
        else if (how == TIES)
            write<TIES>(t, w, factor, code_of);
        else
            write<ANY>(t, w, factor, code_of);
    }

    template <How HOW>
    __device__ __forceinline__ void write(
        const Tile& t, const u32 (&w)[ROWS][WORDS], const float (&factor)[ROWS], const u32 (&code_of)[ROWS]
    ) {
        const u32 mask = nibbles(t.wide);
        const bool inside = WHOLE || t.col < t.cols;
        const i64 apart = EXACT ? t.cols * 2 : across * 8;
        u8* to = p.data + t.row * apart + (EXACT ? t.col * 2 : t.col / 2);
        uint2 bits[2 * DRAWN] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i, to += apart) {
            if (STOCHASTIC && i % (2 * DRAWN) == 0)
                draw((u32)(t.col / 16), (u32)(p.offset + t.place()) + i, 0, p.seed[t.section()], t.lane_col & 8, 1, bits);
            const uint2 drawn = bits[i % (2 * DRAWN)];
            u32 words[WORDS];
#pragma unroll
            for (int j = 0; j < WORDS; ++j) words[j] = w[i][j];
            if (HOW != SHORT) keep_apart(words);
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = value(words, j);
            if constexpr (EXACT) {
                const float scale = decode<E4M3>(code_of[i]);
                uint4 values = exact<STOCHASTIC, HOW>(v, factor[i], drawn, scale);
                if constexpr (IN_SECTIONS) {
                    decode_exact<WAY>(values, p, !by_rows<WAY> ? t.section() : i < t.high ? t.row + i : t.begin(), v);
                    values = narrowed(v);
                }
                if (i < t.high && inside) stream(to, values);
            } else {
                const u32 codes = ::encode<STOCHASTIC, HOW>(v, factor[i], drawn) & mask;
                if (i < t.high && (WHOLE || t.col / 16 < across)) stream(to, codes);
                if (KEEPS) kept[i] = i < t.high ? codes : 0;
            }
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        if (EXACT || !p.data) return;
        const i64 tile = (i64)t.down * HIGH, first_block = (i64)t.across * ACROSS;
        if constexpr (IN_SECTIONS) {
            const i64 begin = SQUARE ? t.section() * down : t.begin(), end = SQUARE ? begin + down : t.end();
            shared.codes.store(threadIdx.x, p.scale, begin + tile, end, t.rows, first_block, across);
        } else {
            shared.codes.store(threadIdx.x, p.scale, tile, SQUARE ? down : t.rows, t.rows, first_block, across);
        }
    }
};

// The codes and scales of a column operand, on their way.
template <bool SQUARE>
struct Columns16 : TransposedNibbles {
    static constexpr int HIGH = SQUARE ? ACROSS : WIDE;
    Codes<SQUARE, HIGH, DOWN> codes;

    __device__ __forceinline__ void store(const Tile& t, u8* data, u8* scale, i64 across, i64 down) {
        if (!data) return;
        const int thread = (int)threadIdx.x - (THREADS - codes.TAKEN);
        if constexpr (IN_SECTIONS) {
            const i64 begin = SQUARE ? t.section() * across : t.lines(), end = begin + (SQUARE ? across : t.cols);
            codes.store(thread, scale, begin + (i64)t.across * HIGH, end, t.all_lines(), t.top() / 16 + (i64)t.down * DOWN,
                        SQUARE ? down : (t.bottom() + 15) / 16);
        } else {
            codes.store(thread, scale, (i64)t.across * HIGH, SQUARE ? across : t.cols, t.cols, (i64)t.down * DOWN, down);
        }
        TransposedNibbles::store(t, data, down, IN_SECTIONS ? (t.bottom() - t.top() + 15) / 16 : down);
    }
};

// A column operand on its way: codes and scales, or the exact form. An exact form that is made stochastically goes to its
// places at once, which is faster there.
template <bool EXACT, bool STOCHASTIC, bool SQUARE>
struct OnTheWay : Columns16<SQUARE> {};
template <bool STOCHASTIC, bool SQUARE>
struct OnTheWay<true, STOCHASTIC, SQUARE> : TransposedValues {
    Codes<SQUARE, SQUARE ? ACROSS : WIDE, DOWN> codes;
};
template <bool SQUARE>
struct OnTheWay<true, true, SQUARE> {
    Codes<SQUARE, SQUARE ? ACROSS : WIDE, DOWN> codes;
};

template <int WAY, bool SQUARE, bool ROTATED, bool EXACT = false>
struct Col : Side {
    static constexpr bool STOCHASTIC = is_stochastic<WAY>;
    typedef nvfp4::Parameters Parameters;
    static_assert(halves_are_16_apart<SQUARE>, "tiles are too wide");
    static constexpr int NEEDS = needs<WAY, EXACT>;
    static constexpr int BITS = ROTATED ? 8 : SIGNIFICANT;  // rotated elements are in bf16
    struct Shared {
        OnTheWay<EXACT, STOCHASTIC, SQUARE> out;
        Factors factors;
        Largest largest;
    };
    const Parameters p;
    Shared& shared;
    const i64 across, down;
    const Scales<WAY, BITS> scales;

    __device__ __forceinline__ Col(const Parameters& p, Shared& shared, const Tile& t)
        : p(p), shared(shared), across((t.cols + 15) / 16), down(((IN_SECTIONS ? t.line() : t.rows) + 15) / 16),
          scales(p, t, shared.factors, shared.largest) {}

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        const i64 row_block = t.place() / 16, col_block = t.col / 16;
        float factor[8], amaxes[8];
        u32 code_of[8], y[8][4];
        if (ROTATED) {
            u32 words[4];
            rotate(t, w, y);
            rotated_amax(y, words);
#pragma unroll
            for (int k = 0; k < 4; ++k) words[k] = larger_pair(words[k], __shfl_xor_sync(~0u, words[k], 16));
#pragma unroll
            for (int j = 0; j < 8; ++j)
                amaxes[j] = __uint_as_float(j & 1 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
        } else {
            u32 words[WORDS];
            col_amax(w, words);
            reduce_lanes<16, 16>(words);
#pragma unroll
            for (int j = 0; j < 8; ++j) amaxes[j] = value(words, j);
        }
        const auto elements = [&](int j, float (&v)[8]) { column_of<ROTATED, true>(w, y, j, v); };
        How how;
        if constexpr (SQUARE) {
            u32 block = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) block = max(block, amax_bits(amaxes[j]));
            block = max(block, __shfl_xor_sync(~0u, block, 1));
            how = square_factors<WAY>(
                __uint_as_float(block), p, scales, shared.factors, t.lane_row % 16 == 0 && t.lane_col % 16 == 0,
                col_block * down + row_block, row_block < down && col_block < across,
                &shared.out.codes[t.lane_col / 16][t.lane_row / 16], factor, code_of, elements);
        } else {
            how = line_factors<WAY, 16>(
                amaxes, p, scales, shared.factors, t.lane_row & 8, row_block < down ? t.wide : 0, t.col, row_block,
                down, t.section() * t.cols + t.col, t.place() == 0, shared.out.codes, t.lane_row / 16, t.lane_col, factor,
                code_of, elements);
        }
        if (!p.data) return;
        if (how == SHORT)
            write<SHORT>(t, w, y, factor, code_of);
        else if (how == TIES)
            write<TIES>(t, w, y, factor, code_of);
        else
            write<ANY>(t, w, y, factor, code_of);
    }

    template <How HOW>
    __device__ __forceinline__ void write(
        const Tile& t, const u32 (&w)[ROWS][WORDS], const u32 (&y)[8][4], const float (&factor)[8],
        const u32 (&code_of)[8]
    ) {
        const u32 mask = ROTATED ? ~0u : nibbles(t.high);  // what pads the rows was rotated with them
        const bool cut = IN_SECTIONS && t.place() / 16 * 16 + 16 > t.end() - t.begin();  // of a whole warp
        uint2 bits[2 * DRAWN] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (STOCHASTIC && j % (2 * DRAWN) == 0)
                draw((u32)((p.offset + t.place()) / 16), (u32)t.col + j, 1, p.seed[t.section()], t.lane_row & 8, 16, bits);
            const uint2 drawn = bits[j % (2 * DRAWN)];
            float v[8];
            column_of<ROTATED, HOW != SHORT>(w, y, j, v);
            if constexpr (EXACT) {
                uint4 values = exact<STOCHASTIC, HOW>(v, factor[j], drawn, decode<E4M3>(code_of[j]));
                if constexpr (IN_SECTIONS) {
                    const i64 own = t.section() * t.cols + (j < t.wide ? t.col + j : 0);
                    decode_exact<WAY>(values, p, by_rows<WAY> ? own : t.section(), v);
                    if (ROTATED && cut) {
                        hadamard16(t.lane_row & 8, v);
#pragma unroll
                        for (int i = 0; i < 8; ++i) v[i] = i < t.high ? v[i] : 0.0f;
                        hadamard16(t.lane_row & 8, v);
                    }
                    values = narrowed(v);
                }
                if constexpr (!STOCHASTIC)
                    shared.out.put(t, j, values);
                else if (j < t.wide && (WHOLE || t.top() + t.place() < t.bottom()))
                    stream((u16*)p.data + (t.lines() + t.col + j) * t.line() + t.top() + t.place(), values);
            } else {
                shared.out.put(t, j, ::encode<STOCHASTIC, HOW>(v, factor[j], drawn) & mask);
            }
        }
    }

    __device__ __forceinline__ void store(const Tile& t) {
        if constexpr (EXACT && !STOCHASTIC)
            shared.out.store(t, p.data);
        else if constexpr (!EXACT)
            shared.out.store(t, p.data, p.scale, across, down);
    }
};

}  // namespace nvfp4
