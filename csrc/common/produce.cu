// Operands of what a source computes, from one read of its inputs: LPQ_SOURCE is a source (see sources.cuh), and LPQ_SIDES has
// a `Sides` for each of its outputs, whose sides (see side.cuh) come from the headers LPQ_HEADER_0 and following.
//
// The inputs of a tile go to shared memory, each thread's to places that no other one touches. It computes the outputs and
// writes them over the inputs. Then the sides of one output after the other run as in pair.cu: they have registers for
// themselves, and what the threads of a block share for them lies where the output did that they have taken from there.
//
// With LPQ_ROUNDED inputs are in fp32, and so are the outputs until they are encoded, which rounds them to elements. Inputs
// would take twice the shared memory: a thread reads them when it computes with them.
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
constexpr bool HIGH = sources::HELD_HIGH;
constexpr int PIECES = sizeof(Source) / sizeof(Element);  // of 16 bytes, in which 8 numbers of an input lie

struct Inputs {
    const void* of[MATRICES + OF_ROW + OF_COL];
};
struct Parts {
    u32* of[OUTPUTS];
};

// The elements of a tile, 8 of a row in each piece.
typedef uint4 Lines[ROWS][THREADS];

// ------------------------------------------------------------------------------------------ elements

// A thread's rows of elements, one after the other.
struct Elements {
    const Inputs& in;
    const Tile& t;
    float of_col[OF_COL ? OF_COL : 1][8];

    __device__ __forceinline__ Elements(const Inputs& in, const Tile& t) : in(in), t(t) {
#pragma unroll
        for (int k = 0; k < OF_COL; ++k) {
            u32 words[PIECES * WORDS] = {};
            if (WHOLE || t.wide) read((const Source*)in.of[MATRICES + OF_ROW + k] + t.col, words);
#pragma unroll
            for (int j = 0; j < 8; ++j) of_col[k][j] = number(words, j);
        }
    }

    __device__ __forceinline__ bool inside(int i) const { return WHOLE || (i < t.high && t.wide); }

    __device__ __forceinline__ const Source* at(int k, int i) const {
        return (const Source*)in.of[k] + place(i, k < Computed::HALVES);
    }

    // 8 numbers as the inputs hold them, and one of these.
    static __device__ __forceinline__ void read(const Source* from, u32 (&words)[PIECES * WORDS]) {
#pragma unroll
        for (int k = 0; k < PIECES * WORDS; k += 4)
            load_16_bytes((const u32*)from + k, words[k], words[k + 1], words[k + 2], words[k + 3]);
    }
    static __device__ __forceinline__ float number(const u32 (&words)[PIECES * WORDS], int j) {
        return HIGH ? __uint_as_float(words[j % (PIECES * WORDS)]) : value(words, j);
    }

    // The place of a thread's row in a matrix, or in half of one.
    __device__ __forceinline__ i64 place(int i, bool half) const { return (t.row + i) * (half ? 2 * t.cols : t.cols) + t.col; }

    // Make the words of row i of each output of those of each input matrix, and the numbers before they are rounded to
    // elements. Outside of the matrix the words are zero.
    __device__ __forceinline__ void compute(
        int i, const u32 (&inputs)[MATRICES][PIECES * WORDS], u32 (&w)[OUTPUTS][WORDS], float (&made)[OUTPUTS][8]
    ) const {
        float of_row[OF_ROW ? OF_ROW : 1];
#pragma unroll
        for (int k = 0; k < OF_ROW; ++k)
            of_row[k] = inside(i) ? ((const float*)in.of[MATRICES + k])[t.row + i] : 0.0f;
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            float y[2][OUTPUTS];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x[MATRICES], of[OF_COL ? OF_COL : 1];
#pragma unroll
                for (int k = 0; k < MATRICES; ++k) x[k] = number(inputs[k], 2 * j + half);
#pragma unroll
                for (int k = 0; k < OF_COL; ++k) of[k] = of_col[k][2 * j + half];
                Computed::compute(x, of_row, of, y[half]);
            }
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) {
                w[k][j] = inside(i) ? rounded(y[0][k], y[1][k]) : 0;
                made[k][2 * j] = y[0][k], made[k][2 * j + 1] = y[1][k];
            }
        }
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
    for (int i = 0; i < ROWS; ++i) {
        const uint4 v = lines[i][threadIdx.x];
        w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
    }
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
            if (!HIGH && elements.inside(i))
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                 (u32)__cvta_generic_to_shared(&lines[k][i][threadIdx.x])),
                             "l"(elements.at(k, i)) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 2
    for (int i = 0; i < ROWS; ++i) {
        u32 x[MATRICES][PIECES * WORDS] = {}, w[OUTPUTS][WORDS];
        float made[OUTPUTS][8];
#pragma unroll
        for (int k = 0; k < MATRICES; ++k) {
            if (HIGH) {
                if (elements.inside(i)) Elements::read(elements.at(k, i), x[k]);
            } else {
                const uint4 v = lines[k][i][threadIdx.x];
                x[k][0] = v.x, x[k][1] = v.y, x[k][2] = v.z, x[k][3] = v.w;
            }
        }
        elements.compute(i, x, w, made);
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) {
            const uint4 v = make_uint4(w[k][0], w[k][1], w[k][2], w[k][3]);
            lines[k][i][threadIdx.x] = v;
            if (!out.value(k) || !elements.inside(i)) continue;
            Source* const to = (Source*)out.value(k) + elements.place(i, k < HALVES_MADE);
            if (HIGH) {
#pragma unroll
                for (int j = 0; j < 8; j += 4)
                    stream(to + j, make_uint4(__float_as_uint(made[k][j]), __float_as_uint(made[k][j + 1]),
                                              __float_as_uint(made[k][j + 2]), __float_as_uint(made[k][j + 3])));
            } else {
                stream(to, v);
            }
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
            u32 x[MATRICES][PIECES * WORDS] = {}, w[OUTPUTS][WORDS];
            float made[OUTPUTS][8];
#pragma unroll
            for (int k = 0; k < MATRICES; ++k)
                if (elements.inside(i)) Elements::read(elements.at(k, i), x[k]);
            elements.compute(i, x, w, made);
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
