// Operands of what a source computes, from one read of its inputs: LPQ_SOURCE is a source (see sources.cuh), and LPQ_SIDES has
// a `Sides` for each of its outputs, whose sides (see side.cuh) come from the headers LPQ_HEADER_0 and following.
//
// The inputs of a tile go to shared memory, each thread's to places that no other one touches. It computes the outputs and
// writes them over the inputs. Then the sides of one output after the other run as in pair.cu: they have registers for
// themselves, and what the threads of a block share for them lies where the output did that they have taken from there.
#include "both.cuh"
#include "nothing.cuh"
#include "sources.cuh"
#include LPQ_HEADER_0
#ifdef LPQ_HEADER_1
#include LPQ_HEADER_1
#endif
#ifdef LPQ_HEADER_2
#include LPQ_HEADER_2
#endif
#ifdef LPQ_HEADER_3
#include LPQ_HEADER_3
#endif
#ifdef LPQ_HEADER_4
#include LPQ_HEADER_4
#endif
#ifdef LPQ_HEADER_5
#include LPQ_HEADER_5
#endif

typedef LPQ_SOURCE Computed;
constexpr int MATRICES = Computed::MATRICES, OUTPUTS = Computed::OUTPUTS, OF_ROW = Computed::OF_ROW, OF_COL = Computed::OF_COL;
constexpr int STAGED = MATRICES > OUTPUTS ? MATRICES : OUTPUTS;
constexpr int HALVES_MADE = OUTPUTS > Computed::HALVES ? Computed::HALVES : 0;

struct Inputs {
    const void* of[MATRICES + OF_ROW + OF_COL];
};
struct Parts {
    u32* of[OUTPUTS];
};

// The elements of a tile, 8 of a row in each piece.
typedef uint4 Lines[ROWS][WORDS / 4][THREADS];
typedef const uint4 (&Line)[WORDS / 4][THREADS];

// This thread's piece of a line.
__device__ __forceinline__ void take(Line line, u32* words) {
#pragma unroll
    for (int k = 0; k < WORDS; k += 4) {
        const uint4 v = line[k / 4][threadIdx.x];
        words[k] = v.x, words[k + 1] = v.y, words[k + 2] = v.z, words[k + 3] = v.w;
    }
}

// ------------------------------------------------------------------------------------------ elements

// A thread's rows of elements, one after the other.
struct Elements {
    const Inputs& in;
    const Tile& t;
    float of_col[OF_COL ? OF_COL : 1][8];

    __device__ __forceinline__ Elements(const Inputs& in, const Tile& t) : in(in), t(t) {
#pragma unroll
        for (int k = 0; k < OF_COL; ++k) {
            u32 words[WORDS] = {};
            if (WHOLE || t.wide) read((const Element*)in.of[MATRICES + OF_ROW + k] + t.col, words);
#pragma unroll
            for (int j = 0; j < 8; ++j) of_col[k][j] = value(words, j);
        }
    }

    __device__ __forceinline__ bool inside(int i) const { return WHOLE || (i < t.high && t.wide); }

    __device__ __forceinline__ const Element* at(int k, int i) const {
        return (const Element*)in.of[k] + place(i, k < Computed::HALVES);
    }

    static __device__ __forceinline__ void read(const Element* from, u32 (&words)[WORDS]) {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4)
            load_16_bytes((const u32*)from + k, words[k], words[k + 1], words[k + 2], words[k + 3]);
    }

    // The place of a thread's row in a matrix, or in half of one.
    __device__ __forceinline__ i64 place(int i, bool half) const { return (t.row + i) * (half ? 2 * t.cols : t.cols) + t.col; }

    // Make row i of each output of row i of each input matrix. Outside of the matrix the words are zero.
    __device__ __forceinline__ void compute(int i, const u32 (&inputs)[MATRICES][WORDS], u32 (&w)[OUTPUTS][WORDS]) const {
        float of_row[OF_ROW ? OF_ROW : 1];
#pragma unroll
        for (int k = 0; k < OF_ROW; ++k)
            of_row[k] = inside(i) ? ((const float*)in.of[MATRICES + k])[t.row + i] : 0.0f;
        float made[OUTPUTS][8];
        if (make<Computed>(inputs, of_row, made)) make<typename sources::Rare<Computed>::Other>(inputs, of_row, made);
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k)
#pragma unroll
            for (int j = 0; j < WORDS; ++j)
                w[k][j] = !inside(i) ? 0 : PER_WORD == 1 ? __float_as_uint(made[k][j])
                                                        : rounded(made[k][2 * j % 8], made[k][(2 * j + 1) % 8]);
    }

    // Make 8 elements of each output. Return whether another source computes one of them (see sources::Rare).
    template <class Source>
    __device__ __forceinline__ bool make(
        const u32 (&inputs)[MATRICES][WORDS], const float* of_row, float (&made)[OUTPUTS][8]
    ) const {
        bool rare = false;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float x[MATRICES], of[OF_COL ? OF_COL : 1], y[OUTPUTS];
#pragma unroll
            for (int k = 0; k < MATRICES; ++k) x[k] = value(inputs[k], j);
#pragma unroll
            for (int k = 0; k < OF_COL; ++k) of[k] = of_col[k][j];
            Source::compute(x, of_row, of, y);
            rare |= sources::Rare<Source>::is(x);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) made[k][j] = y[k];
        }
        return rare;
    }
};

// ------------------------------------------------------------------------------------------ operands

template <class Row_, class Col_>
struct Sides {
    typedef Row_ Row;
    typedef Col_ Col;
    static constexpr bool WANTED = Row::WANTED || Col::WANTED;
    static constexpr int NEEDS = Row::NEEDS > Col::NEEDS ? Row::NEEDS : Col::NEEDS;
    struct Parameters {
        typename Row::Parameters row;
        typename Col::Parameters col;
        void* value;  // where the matrix itself goes; null: it is not wanted
    };
    struct Shared {
        typename Row::Shared row;
        typename Col::Shared col;
    };
    // The bytes that they share, where these do not fit in place of a tile's elements.
    static constexpr int BEYOND = sizeof(Shared) > sizeof(Lines) ? sizeof(Shared) : 0;
};

// The host's arguments for each output.
template <class First, class... Rest>
struct Outputs {
    typedef Outputs<Rest...> Others;
    static constexpr int NEEDS = First::NEEDS > Others::NEEDS ? First::NEEDS : Others::NEEDS;
    static constexpr int BEYOND = First::BEYOND > Others::BEYOND ? First::BEYOND : Others::BEYOND;
    typename First::Parameters first;
    Others rest;
    __device__ __forceinline__ void* value(int k) const { return k ? rest.value(k - 1) : first.value; }
};
template <class Last>
struct Outputs<Last> {
    static constexpr int NEEDS = Last::NEEDS, BEYOND = Last::BEYOND;
    typename Last::Parameters first;
    __device__ __forceinline__ void* value(int) const { return first.value; }
};
typedef Outputs<LPQ_SIDES> AllOutputs;

template <class S>
__device__ __forceinline__ void encode_output(const Tile& t, const typename S::Parameters& p, Lines& lines, void* beyond) {
    u32 w[ROWS][WORDS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) take(lines[i], w[i]);
    __syncthreads();
    typename S::Shared& shared = *(typename S::Shared*)(S::BEYOND ? beyond : (void*)lines);
    typename S::Row row(p.row, shared.row, t);
    typename S::Col col(p.col, shared.col, t);
    encode_tile(t, w, row, col, p.row.data);
}

template <class First, class... Rest>
__device__ __forceinline__ void encode_outputs(const Tile& t, const Outputs<First, Rest...>& p, Lines* lines, void* beyond) {
    if constexpr (First::WANTED) encode_output<First>(t, p.first, *lines, beyond);
    if constexpr (sizeof...(Rest) > 0) encode_outputs(t, p.rest, lines + 1, beyond);
}

// Blocks of threads to a multiprocessor, by their registers and by their shared memory.
constexpr int BY_REGISTERS = fitting<AllOutputs::NEEDS>;
constexpr int BY_MEMORY = (227 << 10) / ((int)sizeof(Lines) * STAGED + AllOutputs::BEYOND + 1024);
constexpr int AT_ONCE = BY_REGISTERS < BY_MEMORY ? BY_REGISTERS : BY_MEMORY;

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE ? AT_ONCE : 1) produce(
    const Inputs in, const AllOutputs out, u32 count, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    extern __shared__ uint4 staged[];
    Lines* const lines = (Lines*)staged;
    __shared__ uint4 beyond[AllOutputs::BEYOND / 16 + 1];
    // Backwards: what was read last to measure the outputs may still be in the cache.
    const Tile t(rows, cols, count - 1 - blockIdx.x);
    const Elements elements(in, t);
#pragma unroll
    for (int k = 0; k < MATRICES; ++k)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < WORDS / 4; ++j)
                if (elements.inside(i))
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                     (u32)__cvta_generic_to_shared(&lines[k][i][j][threadIdx.x])),
                                 "l"((const uint4*)elements.at(k, i) + j) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 2
    for (int i = 0; i < ROWS; ++i) {
        u32 x[MATRICES][WORDS] = {}, w[OUTPUTS][WORDS];
#pragma unroll
        for (int k = 0; k < MATRICES; ++k) take(lines[k][i], x[k]);
        elements.compute(i, x, w);
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) {
            for (int j = 0; j < WORDS; j += 4)
                lines[k][i][j / 4][threadIdx.x] = make_uint4(w[k][j], w[k][j + 1], w[k][j + 2], w[k][j + 3]);
            if (!out.value(k) || !elements.inside(i)) continue;
            uint4* const to = (uint4*)((Element*)out.value(k) + elements.place(i, k < HALVES_MADE));
#pragma unroll
            for (int j = 0; j < WORDS; j += 4)
                stream(to + j / 4, make_uint4(w[k][j], w[k][j + 1], w[k][j + 2], w[k][j + 3]));
        }
    }
    encode_outputs(t, out, lines, beyond);
}

// ------------------------------------------------------------------------------------------ amaxes

// parts.of[output][block]: the largest magnitude, as fp32 bits, in the tiles of this block, where it is wanted.
extern "C" __global__ void __launch_bounds__(THREADS, fitting<64>) amaxes(
    const Inputs in, const Parts parts, u32 count, i64 rows, i64 cols
) {
    wait_for_the_one_before();
    u32 most[OUTPUTS] = {};
    for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
        const Tile t(rows, cols, index);
        const Elements elements(in, t);
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            u32 x[MATRICES][WORDS] = {}, w[OUTPUTS][WORDS];
#pragma unroll
            for (int k = 0; k < MATRICES; ++k)
                if (elements.inside(i)) Elements::read(elements.at(k, i), x[k]);
            elements.compute(i, x, w);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k)
#pragma unroll
                for (int j = 0; j < WORDS; ++j) most[k] = larger_magnitude(most[k], w[k][j]);
        }
    }
    __shared__ Largest largest[OUTPUTS];
#pragma unroll
    for (int k = 0; k < OUTPUTS; ++k) {
        const u32 bits = block_max(amax_bits(element_value(larger_half(magnitude(most[k])))), largest[k]);
        if (parts.of[k] && threadIdx.x == 0) parts.of[k][blockIdx.x] = bits;
    }
}
