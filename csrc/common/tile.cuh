// A tile of LPQ_TALL x LPQ_WIDE elements, held by threads of 8 x 8 each, and the ways in and out of it.
//
// 16 or 32 lanes next to each other hold a line of the tile, so that a warp reads and writes pieces of whole lines: a block
// of 16 or 32 along a row is 2 or 4 lanes. Where 16 lanes do, one of 16 along a column is the two lanes 16 apart. Tiles are
// tall where a column operand is written, whose lines then go out in large pieces; in tiles of 256 columns lines are read
// and rows are written in larger pieces, too. Elements outside of the matrix are zero; LPQ_WHOLE says that there are
// none, and that lines begin at multiples of 16 bytes, which saves many instructions.
#pragma once
#include "numbers.cuh"
#ifdef LPQ_SECTIONS
#include "sections.cuh"
#endif

#ifndef LPQ_TALL
#define LPQ_TALL 128
#endif
#ifndef LPQ_WIDE
#define LPQ_WIDE 128
#endif
#ifdef LPQ_WHOLE
constexpr bool WHOLE = true;
#else
constexpr bool WHOLE = false;
#endif
constexpr int TALL = LPQ_TALL;
constexpr int WIDE = LPQ_WIDE;
constexpr int UNIT = 128;                     // the side of the squares that long blocks belong to
constexpr int UNITS_ACROSS = WIDE / UNIT;     // in a tile
constexpr int ROWS = 8;
constexpr int ABREAST = WIDE / 8;             // lanes that hold a line
constexpr int THREADS = TALL * WIDE / 64;
constexpr int WARPS = THREADS / 32;
constexpr int WARP_ROWS = 32 / ABREAST * ROWS;
constexpr int LINES = ROWS / PER_WORD;  // words with an element for each of a thread's rows
// Blocks of threads to a multiprocessor, where a thread needs this many registers.
template <int REGISTERS>
constexpr int fitting = 65536 / (REGISTERS * THREADS);
#ifdef LPQ_ROUNDED  // the matrix is in fp32, and rounded to LPQ_INPUT as it is read
typedef float Source;
constexpr int REGISTERS = 96;
#else
typedef Element Source;
constexpr int REGISTERS = LPQ_INPUT == LPQ_FP32 ? 128 : 64;
#endif

#ifdef LPQ_SECTIONS
constexpr bool IN_SECTIONS = true;
#else
constexpr bool IN_SECTIONS = false;
#endif

// Whether scales of blocks lie row by row, as they are sent to other ranks.
#ifdef LPQ_ROW_MAJOR
constexpr bool ROW_MAJOR = true;
#else
constexpr bool ROW_MAJOR = false;
#endif

struct Tile {
    i64 rows, cols;            // of the matrix
    u32 across, down;          // the place of this tile among the tiles, of its section if there are sections
    int lane_row, lane_col;    // this thread's first row and column in the tile
    i64 row, col;              // the same in the matrix
    int high, wide;            // how many of this thread's rows and columns lie in the matrix

    __device__ __forceinline__ Tile(i64 rows, i64 cols, u32 index) : rows(rows), cols(cols) {
#if defined(LPQ_COL) && !defined(LPQ_ROW)  // tiles follow each other along what is written
        const u32 in_a_col = (u32)((rows + TALL - 1) / TALL);
        across = index / in_a_col, down = index - across * in_a_col;
#else
        const u32 in_a_row = (u32)((cols + WIDE - 1) / WIDE);
        down = index / in_a_row, across = index - down * in_a_row;
#endif
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        lane_row = warp * WARP_ROWS + lane / ABREAST * ROWS;
        lane_col = lane % ABREAST * 8;
        go_to((i64)down * TALL + lane_row, (i64)across * WIDE + lane_col);
    }

    // Have this thread take the rows and columns from here on.
    __device__ __forceinline__ void go_to(i64 first_row, i64 first_col) {
        row = first_row, col = first_col;
        high = !WHOLE && rows - row < ROWS ? max((int)(rows - row), 0) : ROWS;
        wide = !WHOLE && cols - col < 8 ? max((int)(cols - col), 0) : 8;
    }

#ifdef LPQ_SECTIONS
    Section of;
    i64 line_, lines_, all_lines_;

    __device__ __forceinline__ Tile(const Sections& sections, i64 rows, i64 cols, u32 index) : Tile(rows, cols, index) {
        const u32 in_a_row = (u32)((cols + WIDE - 1) / WIDE);
        const u32 whole = index / in_a_row;
        across = index - whole * in_a_row;
        of = section_of(sections, whole, TALL);
        down = of.part;
        row = of.begin + (i64)down * TALL + lane_row;
        col = (i64)across * WIDE + lane_col;
        high = WHOLE ? ROWS : (int)max(min(of.end - row, (i64)ROWS), (i64)0);
        wide = !WHOLE && cols - col < 8 ? max((int)(cols - col), 0) : 8;
        line_ = sections.line, lines_ = sections.ends ? 0 : of.number * cols;
        all_lines_ = sections.ends ? cols : sections.count * cols;
    }
#endif

    // The section that this tile is of: without sections, the matrix.
#ifdef LPQ_SECTIONS
    __device__ __forceinline__ u32 section() const { return of.number; }
    __device__ __forceinline__ i64 place() const { return row - of.begin; }    // this thread's first row among its rows
    __device__ __forceinline__ i64 begin() const { return of.begin; }          // its first row,
    __device__ __forceinline__ i64 end() const { return of.end; }              // and the one behind its last
    __device__ __forceinline__ i64 top() const { return of.top; }              // its place along lines of the column operand
    __device__ __forceinline__ i64 bottom() const { return of.bottom; }
    __device__ __forceinline__ i64 line() const { return line_; }              // how long such a line is,
    __device__ __forceinline__ i64 lines() const { return lines_; }            // how many there are before the lines of the section
    __device__ __forceinline__ i64 all_lines() const { return all_lines_; }    // and in all
#else
    __device__ __forceinline__ u32 section() const { return 0; }
    __device__ __forceinline__ i64 place() const { return row; }
    __device__ __forceinline__ i64 begin() const { return 0; }
    __device__ __forceinline__ i64 end() const { return rows; }
    __device__ __forceinline__ i64 top() const { return 0; }
    __device__ __forceinline__ i64 bottom() const { return rows; }
    __device__ __forceinline__ i64 line() const { return rows; }
    __device__ __forceinline__ i64 lines() const { return 0; }
    __device__ __forceinline__ i64 all_lines() const { return cols; }
#endif
};

// Memory that the threads of a block share, for all that is in T. The host must ask for more than 48 KiB.
constexpr int LARGE_TILE = 96 << 10;
template <class T>
__device__ __forceinline__ T& in_shared_memory() {
    if constexpr (sizeof(T) > 48 << 10) {
        extern __shared__ uint4 dynamic[];
        static_assert(sizeof(T) <= LARGE_TILE, "the host asks for less");
        return *(T*)dynamic;
    } else {
        __shared__ T fixed;
        return fixed;
    }
}

__device__ __forceinline__ void load_16_bytes(const void* from, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(from));
}

// Results are not read again here, and go out of the cache before what is: without that a cast is 6 % slower.
__device__ __forceinline__ void stream(void* to, uint4 v) { __stcs((uint4*)to, v); }
__device__ __forceinline__ void stream(void* to, uint2 v) { __stcs((uint2*)to, v); }
__device__ __forceinline__ void stream(void* to, u32 v) { __stcs((u32*)to, v); }

// Scales stay in the cache, where scales of other blocks complete their lines: for blocks of 1x128 that brings 3 %. A piece that is
// less than a sector of 32 bytes would cost a read besides, alone in memory.
__device__ __forceinline__ void store_piece(void* to, u32 v) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " st.global.L2::cache_hint.u32 [%0], %1, policy; }" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_piece(void* to, uint2 v) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, policy; }" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_piece(void* to, uint4 v) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, policy; }"
        ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The words of the elements in 16 bytes.
constexpr int LOADED = 16 / sizeof(Source) / PER_WORD;

__device__ __forceinline__ void load_words(const Source* from, u32 (&words)[LOADED]) {
    u32 bits[4];
    load_16_bytes(from, bits[0], bits[1], bits[2], bits[3]);
#pragma unroll
    for (int k = 0; k < LOADED; ++k)
#ifdef LPQ_ROUNDED
        words[k] = rounded(__uint_as_float(bits[2 * k]), __uint_as_float(bits[2 * k + 1]));
#else
        words[k] = bits[k];
#endif
}

__device__ __forceinline__ u32 load_element(const Source* from) {
#ifdef LPQ_ROUNDED
    return rounded(*from, 0.0f);
#else
    return *from;
#endif
}

// This thread's elements. Unless the rows begin at multiples of 16 bytes they are read one by one.
__device__ __forceinline__ void load(const Tile& t, const void* x, u32 (&w)[ROWS][WORDS]) {
    const Source* from = (const Source*)x + t.row * t.cols + t.col;
    if (WHOLE || (t.cols % 8 == 0 && (u64)x % 16 == 0)) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) w[i][j] = 0;
            if (i < t.high && t.wide) {
#pragma unroll
                for (int j = 0; j < WORDS; j += LOADED) {
                    u32 words[LOADED];
                    load_words(from + i * t.cols + j * PER_WORD, words);
#pragma unroll
                    for (int k = 0; k < LOADED; ++k) w[i][j + k] = words[k];
                }
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) w[i][j] = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (i < t.high && j < t.wide)
                    w[i][j / PER_WORD] |= load_element(from + i * t.cols + j) << (16 * (j % PER_WORD));
        }
    }
}

// The elements of the next tile, on their way to shared memory while a block works on this one. Each thread copies those that
// it takes itself. For whole tiles of 16-bit numbers, where it is WANTED: all else is read when it is taken.
template <bool WANTED = true>
struct Ahead {
    static constexpr bool USED = WANTED && WHOLE && sizeof(Source) == 2;
    uint4 lines[USED ? ROWS : 1][USED ? THREADS : 1];

    __device__ __forceinline__ void fetch(const Tile& t, const void* x) {
        if (!USED) return;
        const Source* from = (const Source*)x + t.row * t.cols + t.col;
        const u32 to = (u32)__cvta_generic_to_shared(&lines[0][threadIdx.x]);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * (u32)sizeof(lines[0])),
                         "l"(from + i * t.cols) : "memory");
    }

    // The elements of the tile that was fetched, which is this one. Another may be fetched then.
    __device__ __forceinline__ void take(const Tile& t, const void* x, u32 (&w)[ROWS][WORDS]) const {
        if (!USED) return load(t, x, w);
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const uint4 v = lines[i][threadIdx.x];
            w[i][0] = v.x, w[i][1 % WORDS] = v.y, w[i][2 % WORDS] = v.z, w[i][3 % WORDS] = v.w;
        }
        __syncwarp();
    }
};

// ------------------------------------------------------------------------------------------ magnitudes

// The largest magnitude in each of this thread's rows, as words of their elements.
__device__ __forceinline__ void row_amax(const u32 (&w)[ROWS][WORDS], u32 (&amax)[LINES]) {
    u32 each[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        each[i] = w[i][0];
#pragma unroll
        for (int j = 1; j < WORDS; ++j) each[i] = larger_magnitude(each[i], w[i][j]);
    }
#pragma unroll
    for (int k = 0; k < LINES; ++k) {
        if (PER_WORD == 1)
            amax[k] = magnitude(each[k]);
        else  // the low halves of two rows beside their high halves
            amax[k] = magnitude(larger_magnitude(__byte_perm(each[k * 2 % ROWS], each[(k * 2 + 1) % ROWS], 0x5410),
                                                 __byte_perm(each[k * 2 % ROWS], each[(k * 2 + 1) % ROWS], 0x7632)));
    }
}

// The largest magnitude in each of this thread's columns, as words of 8 elements.
__device__ __forceinline__ void col_amax(const u32 (&w)[ROWS][WORDS], u32 (&amax)[WORDS]) {
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
        amax[j] = w[0][j];
#pragma unroll
        for (int i = 1; i < ROWS; ++i) amax[j] = larger_magnitude(amax[j], w[i][j]);
        amax[j] = magnitude(amax[j]);
    }
}

// Whether none of these elements is infinite or NaN.
template <int N>
__device__ __forceinline__ bool are_finite(const u32 (&words)[N]) {
    u32 most = words[0];
#pragma unroll
    for (int k = 1; k < N; ++k) most = larger_magnitude(most, words[k]);
    return larger_half(magnitude(most)) < INFINITE;
}

// The largest of what the lanes hold that differ in the bits of mask from FIRST to LAST.
template <int FIRST, int LAST, int N>
__device__ __forceinline__ void reduce_lanes(u32 (&amax)[N]) {
#pragma unroll
    for (int apart = FIRST; apart <= LAST; apart *= 2)
#pragma unroll
        for (int k = 0; k < N; ++k) amax[k] = larger(amax[k], __shfl_xor_sync(~0u, amax[k], apart));
}

// The same of the lanes that hold other rows of the same columns.
__device__ __forceinline__ void reduce_rows(u32 (&amax)[WORDS]) { reduce_lanes<ABREAST, 16>(amax); }

// The largest magnitude in each column of the rows of each warp: what a taller block takes its amax from.
struct Columns {
    alignas(16) Element of[WARPS][WIDE];

    // To be called with the words of col_amax, after reduce_rows; all threads wait for each other then.
    __device__ __forceinline__ void put(const Tile& t, const u32 (&amax)[WORDS]) {
        if ((threadIdx.x & 31) < ABREAST)
#pragma unroll
            for (int k = 0; k < WORDS; k += 4)
                ((uint4*)&of[threadIdx.x >> 5][t.lane_col])[k / 4] =
                    make_uint4(amax[k], amax[k + 1], amax[k + 2], amax[k + 3]);
    }
    // The larger of what this warp and another have in this thread's columns.
    __device__ __forceinline__ void merge(const Tile& t, int warp, u32 (&amax)[WORDS]) const {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
            const uint4 other = ((const uint4*)&of[warp][t.lane_col])[k / 4];
            amax[k] = larger(amax[k], other.x), amax[k + 1] = larger(amax[k + 1], other.y);
            amax[k + 2] = larger(amax[k + 2], other.z), amax[k + 3] = larger(amax[k + 3], other.w);
        }
    }
    // The largest of some warps' in one column, as fp32 bits.
    __device__ __forceinline__ u32 largest(int col, int first, int count) const {
        u32 bits = 0;
        for (int k = 0; k < count; ++k) bits = max(bits, (u32)of[first + k][col]);
        return amax_bits(element_value(bits));
    }
};

// The largest magnitude of this thread's elements, as fp32 bits.
__device__ __forceinline__ u32 thread_amax(const u32 (&w)[ROWS][WORDS]) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < WORDS; ++j) amax = larger_magnitude(amax, w[i][j]);
    return amax_bits(element_value(larger_half(magnitude(amax))));
}

// The largest fp32 bits of threads, in two steps between which they wait for each other.
struct Largest {
    u32 of[32][UNITS_ACROSS];  // of the lanes of each warp that hold elements of the same units

    __device__ __forceinline__ void put(u32 bits) {
        if (UNITS_ACROSS == 1) {
            bits = __reduce_max_sync(~0u, bits);
        } else {
#pragma unroll
            for (int apart = 1; apart < 16; apart *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, apart));
        }
        if (threadIdx.x % (32 / UNITS_ACROSS) == 0) of[threadIdx.x / 32][threadIdx.x % 32 / (32 / UNITS_ACROSS)] = bits;
    }
    // The largest of all threads, in every one of them.
    __device__ __forceinline__ u32 of_block() const {
        const int lane = threadIdx.x & 31;
        u32 bits = 0;
        if (lane < blockDim.x / 32)
#pragma unroll
            for (int k = 0; k < UNITS_ACROSS; ++k) bits = max(bits, of[lane][k]);
        return __reduce_max_sync(~0u, bits);
    }
};

// The largest of all threads' fp32 bits, in every one of them.
__device__ __forceinline__ u32 block_max(u32 bits, Largest& largest) {
    largest.put(bits);
    __syncthreads();
    return largest.of_block();
}

// The largest of some fp32 bits in memory, in every thread of the block.
__device__ __forceinline__ u32 largest_of(const u32* values, u32 count, Largest& largest) {
    if (count == 1) return *values;
    u32 bits = 0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) bits = max(bits, values[i]);
    return block_max(bits, largest);
}
