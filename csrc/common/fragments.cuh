// Casting fragments of many fp32 matrices at once, each a piece of a flattened matrix that begins and ends anywhere.
//
// A format's source says LPQ_CAST(Format) for a struct Format that has
//   Scale   what the scale of a block is stored as,
//   BITS    4 or 8, those of a code,
//   OVERALL whether there is a first statistic, the amax of the matrix, beside the amax of each block,
//   scale(amax, overall, factor)  the scale of a block, and the factor that its elements are multiplied by,
//   pair(a, p, b, q)              the codes of a times p and b times q, the first one low.
// LPQ_DOWN, LPQ_ACROSS: rows and columns of the matrix that a block covers; 0: all. LPQ_COL: the operand is the column
// operand, whose codes are written in the order of the matrix too, and whose scales are not. LPQ_ROUNDED: elements are
// rounded to LPQ_INPUT as they are read.
//
// One block of threads takes one tile of one fragment, and looks up in the table which.
#pragma once
#include "numbers.cuh"

constexpr int DOWN = LPQ_DOWN, ACROSS = LPQ_ACROSS;
#ifdef LPQ_COL
constexpr bool COL = true;
#else
constexpr bool COL = false;
#endif
constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int TILE = 128;        // rows and columns that are measured by one block of threads
constexpr int SCALES = 32;       // lines and columns of scales
constexpr int CODES = 4096;      // bytes of codes
constexpr int HEAD = 4;          // the words in which a rank sends where its fragment begins and ends
enum Kernel { MEASURE, SCALE, CODE };

static_assert(DOWN == 0 || DOWN == 1 || (DOWN % 16 == 0 && TILE % DOWN == 0), "rows of a block");
static_assert(ACROSS == 0 || ACROSS == 1 || (ACROSS % 4 == 0 && TILE % ACROSS == 0), "columns of a block");
static_assert(DOWN != 1 || ACROSS != 1, "one scale for each element");

// As lpq.kernels.fragments.Fragment: 8 bytes for each field.
struct Fragment {
    const u32* values;                      // its elements, as bits
    u8* codes;                              // those of the whole matrix
    void* scales;                           // of the whole matrix, in the order of the operand
    u32* kept;                              // where the operand keeps the first of two statistics
    u32 *amaxes, *overall;                  // the statistics: where those of the fragment go
    const u32 *used_amaxes, *used_overall;  // and those to encode with
    float* factors;                         // for each block
    const u32* ends;                        // what all ranks said of the ends of their fragments; null: all is here
    i64 reach, ranks;
    i64 rows, cols, start, stop;
    i64 codes_start, codes_stop, width;     // the bytes to write, and how many make up a line
    i64 first[3];                           // its first block of threads in each kernel
};

__device__ __forceinline__ Fragment fragment_here(const Fragment* table, i64 count, Kernel kernel) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (table[middle].first[kernel] <= (i64)blockIdx.x) low = middle;
        else high = middle;
    }
    return table[low];
}

// The bits of an element, once it is read.
__device__ __forceinline__ u32 as_read(u32 bits) {
#ifdef LPQ_ROUNDED
    const u32 word = rounded(__uint_as_float(bits), 0.0f);
    return LPQ_INPUT == LPQ_BF16 ? word << 16 : __float_as_uint(half_value(word & 0xffffu));
#else
    return bits;
#endif
}

__device__ __forceinline__ i64 blocks_of(i64 size, int step) { return step ? (size + step - 1) / step : 1; }

// Four elements from `position` on, of which `count` are in the same row; zeros for what is not in the fragment.
__device__ __forceinline__ void load_four(const Fragment& f, i64 position, i64 count, u32 (&w)[4]) {
    const u32* from = f.values + (position - f.start);
    if (count >= 4 && position >= f.start && position + 4 <= f.stop && (u64)from % 16 == 0) {
        const uint4 all = *(const uint4*)from;
        w[0] = as_read(all.x), w[1] = as_read(all.y), w[2] = as_read(all.z), w[3] = as_read(all.w);
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = j < count && position + j >= f.start && position + j < f.stop ? as_read(from[j]) : 0;
}

template <int LANES>
__device__ __forceinline__ u32 max_of_lanes(u32 bits) {
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, apart));
    return bits;
}

// ------------------------------------------------------------------------------------------ the amaxes of blocks

template <class F>
__device__ __forceinline__ void measure_fragments(const Fragment* table, i64 count) {
    constexpr int HIGH = DOWN ? TILE / DOWN : 1, BROAD = ACROSS ? TILE / ACROSS : 1;
    constexpr int LANES = ACROSS == 1 ? 1 : ACROSS ? ACROSS / 4 : 32;  // that share a block
    constexpr int ROWS = TILE / WARPS;
    __shared__ u32 maxima[HIGH * BROAD];
    for (int k = threadIdx.x; k < HIGH * BROAD; k += THREADS) maxima[k] = 0;
    const Fragment f = fragment_here(table, count, MEASURE);
    const i64 place = blockIdx.x - f.first[MEASURE], tiles = (f.cols + TILE - 1) / TILE;
    const i64 top = (f.start / f.cols / TILE + place / tiles) * TILE, left = place % tiles * TILE;
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * ROWS;
    const i64 col = left + 4 * lane;
    u32 w[ROWS][4];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) load_four(f, (top + line + i) * f.cols + col, f.cols - col, w[i]);
    __syncthreads();
    u32 amax[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) amax[j] = max(DOWN == 1 ? 0 : amax[j], w[i][j] & 0x7fffffffu);
        if (DOWN == 1) {
            const u32 most = max_of_lanes<LANES>(max(max(amax[0], amax[1]), max(amax[2], amax[3])));
            if (lane % LANES == 0) atomicMax(&maxima[(line + i) * BROAD + lane / LANES], most);
        }
    }
    if (DOWN != 1) {
        const int from = (DOWN ? line / DOWN : 0) * BROAD;
        if (ACROSS == 1) {
#pragma unroll
            for (int j = 0; j < 4; ++j) atomicMax(&maxima[from + 4 * lane + j], amax[j]);
        } else {
            const u32 most = max_of_lanes<LANES>(max(max(amax[0], amax[1]), max(amax[2], amax[3])));
            if (lane % LANES == 0) atomicMax(&maxima[from + lane / LANES], most);
        }
    }
    __syncthreads();
    const i64 lines = blocks_of(f.rows, DOWN), width = blocks_of(f.cols, ACROSS);
    const i64 first_line = DOWN ? top / DOWN : 0, first_col = ACROSS ? left / ACROSS : 0;
    u32 most = 0;
    for (int k = threadIdx.x; k < HIGH * BROAD; k += THREADS) {
        const u32 bits = amax_bits(__uint_as_float(maxima[k]));
        const i64 down = first_line + k / BROAD, across = first_col + k % BROAD;
        if (F::OVERALL) most = max(most, bits);
        if (down >= lines || across >= width || bits == 0) continue;
        if (DOWN && ACROSS) f.amaxes[down * width + across] = bits;  // no other tile has elements of this block
        else atomicMax(&f.amaxes[down * width + across], bits);
    }
    if (F::OVERALL) {
        most = max_of_lanes<32>(most);
        if (lane == 0 && most) atomicMax(f.overall, most);
    }
}

// ------------------------------------------------------------------------------------------ scales and factors

template <class F>
__device__ __forceinline__ void scale_fragments(const Fragment* table, i64 count) {
    typedef typename F::Scale Scale;
    __shared__ Scale turned[SCALES][SCALES + 1];
    const Fragment f = fragment_here(table, count, SCALE);
    const i64 lines = blocks_of(f.rows, DOWN), width = blocks_of(f.cols, ACROSS);
    const i64 place = blockIdx.x - f.first[SCALE], tiles = (width + SCALES - 1) / SCALES;
    const i64 top = place / tiles * SCALES, left = place % tiles * SCALES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 overall = F::OVERALL ? *f.used_overall : 0;
    Scale* const scales = (Scale*)f.scales;
    for (int i = warp; i < SCALES; i += WARPS) {
        const i64 line = top + i, col = left + lane, at = line * width + col;
        if (line >= lines || col >= width) continue;
        const Scale scale = F::scale(f.used_amaxes[at], overall, f.factors[at]);
        if (COL) turned[i][lane] = scale;
        else scales[at] = scale;
    }
    if (F::OVERALL && place == 0 && threadIdx.x == 0) *f.kept = overall;
    if (!COL) return;
    __syncthreads();
    for (int i = warp; i < SCALES; i += WARPS) {
        const i64 col = left + i, line = top + lane;
        if (line < lines && col < width) scales[col * lines + line] = turned[lane][i];
    }
}

// ------------------------------------------------------------------------------------------ codes

// An element that belongs to another rank's fragment, and shares a code with one of this.
__device__ __noinline__ u32 of_others(const u32* ends, i64 ranks, i64 reach, i64 cols, i64 position) {
    for (i64 rank = 0; ends && rank < ranks; ++rank) {
        const u32* said = ends + rank * (HEAD + 2 * reach);
        const i64 start = said[0] * cols + said[1], stop = said[2] * cols + said[3];
        if (position < start || position >= stop) continue;
        if (position - start < reach) return said[HEAD + position - start];
        if (stop - position <= reach) return said[HEAD + 2 * reach - (stop - position)];
    }
    return 0;
}

__device__ __forceinline__ i64 factor_of(i64 row, i64 col, i64 width) {
    return (DOWN ? row / (DOWN ? DOWN : 1) : 0) * width + (ACROSS ? col / (ACROSS ? ACROSS : 1) : 0);
}

// Four bytes, of 4 or 8 elements, from the place `at` on. Which of them are to be written is in the result, as bits.
template <class F, int N>
__device__ __forceinline__ u32 gather_elements(const Fragment& f, i64 at, float (&x)[N], float (&p)[N]) {
    constexpr int PER = N / 4;  // elements of a byte: along the columns, or for a column operand along the rows
    constexpr int PER_ROW = COL ? 1 : PER, PER_COL = COL ? PER : 1;
    const bool small = f.codes_stop < (i64)1 << 31;  // 32-bit division is much cheaper
    const i64 line = small ? (u32)at / (u32)f.width : at / f.width, byte = at - line * f.width;
    const i64 row = line * PER_COL, col = byte * PER_ROW, width = blocks_of(f.cols, ACROSS);
    const i64 position = row * f.cols + col, last = position + (PER_COL - 1) * f.cols + 4 * PER_ROW;
    const bool whole = at >= f.codes_start && at + 4 <= f.codes_stop && col + 4 * PER_ROW <= f.cols &&
                       row + PER_COL <= f.rows && position >= f.start && last <= f.stop;
    if (whole && (ACROSS <= 1 || col % (ACROSS ? ACROSS : 1) + 4 * PER_ROW <= ACROSS)) {
#pragma unroll
        for (int k = 0; k < PER; ++k) {  // four elements at a time: of one row, or of two
            u32 w[4];
            load_four(f, position + (COL ? k * f.cols : 4 * k), 4, w);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[COL ? j * PER + k : 4 * k + j] = __uint_as_float(w[j]);
        }
        const float* factors = f.factors + factor_of(row, col, width);
#pragma unroll
        for (int n = 0; n < N; ++n) p[n] = factors[ACROSS == 1 ? (COL ? n / PER : n) : 0];
        return 0xf;
    }
    u32 wanted = 0;
    for (int n = 0; n < N; ++n) {
        const i64 here = at + n / PER;
        x[n] = 0.0f, p[n] = 1.0f;  // what pads a line
        if (here < f.codes_start || here >= f.codes_stop) continue;
        const i64 l = here / f.width, b = here - l * f.width;
        const i64 r = l * PER_COL + (COL ? n % PER : 0), c = b * PER_ROW + (COL ? 0 : n % PER);
        const i64 where = r * f.cols + c;
        const bool exists = r < f.rows && c < f.cols, own = where >= f.start && where < f.stop;
        if (exists) {
            const u32 bits = own ? as_read(f.values[where - f.start]) : of_others(f.ends, f.ranks, f.reach, f.cols, where);
            x[n] = __uint_as_float(bits);
            p[n] = f.factors[factor_of(r, c, width)];
        }
        // A byte without an element belongs to who has the last ones of its line.
        if (exists ? own : n % PER == 0) wanted |= 1u << n / PER;
    }
    return wanted;
}

template <class F>
__device__ __forceinline__ void code_fragments(const Fragment* table, i64 count) {
    constexpr int N = 32 / F::BITS;
    const Fragment f = fragment_here(table, count, CODE);
    const i64 from = (f.codes_start / 4 * 4) + (blockIdx.x - f.first[CODE]) * CODES;
    for (int k = 0; k < CODES / 4 / THREADS; ++k) {
        const i64 at = from + (k * THREADS + (i64)threadIdx.x) * 4;
        if (at >= f.codes_stop) return;
        float x[N], p[N];
        const u32 wanted = gather_elements<F>(f, at, x, p);
        u32 codes = 0;
#pragma unroll
        for (int n = 0; n < N; n += 2) codes |= F::pair(x[n], p[n], x[n + 1], p[n + 1]) << n * F::BITS;
        u8* to = f.codes + at;
        if (wanted == 0xf && (u64)to % 4 == 0) {
            *(u32*)to = codes;
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (wanted >> j & 1) to[j] = (u8)(codes >> 8 * j);
        }
    }
}

#define LPQ_KERNEL(NAME, OF_FRAGMENTS)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const Fragment* table, i64 count) { \
        wait_for_the_one_before();                                                               \
        OF_FRAGMENTS(table, count);                                                              \
    }
#define LPQ_CAST(FORMAT)                            \
    LPQ_KERNEL(measure, measure_fragments<FORMAT>) \
    LPQ_KERNEL(scales, scale_fragments<FORMAT>)    \
    LPQ_KERNEL(codes, code_fragments<FORMAT>)
