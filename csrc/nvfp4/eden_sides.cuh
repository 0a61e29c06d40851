// NVFP4 by MS-EDEN: an operand of a tile. Some lines at a time go through shared memory, to threads that take a block of 16.
//
// EXACT: elements times the scales of their blocks times 2^-11 go out in place of an operand, in bf16, which holds them
// exactly; the contraction is a multiple of 128. In sections, what an operand decodes to, rounded to bf16, in the basis in which
// it is stored: each section has an amax and a seed, and counts in no product behind its last row.
#pragma once
#include "eden.cuh"
#include "side.cuh"

namespace eden {

struct Parameters {
    u8 *data, *scale;   // null: not wanted
    u32 *amax, *turn;   // of the operand, to be written
    const u32* amaxes;  // the largest of them is the matrix's
    alignas(8) u32 count;
    const u64* seed;
    i64 offset;
};

template <bool COL, bool EXACT>
struct Operand : Side {
    typedef eden::Parameters Parameters;
    static_assert(TALL == 128 && WIDE == 128, "a tile has whole groups of both operands");
    static constexpr int NEEDS = REGISTERS > 128 ? REGISTERS : 128;
    struct Shared {
        Lines lines;
        Largest largest;
    };
    const Parameters p;
    Shared& shared;
    u32 amax;

    __device__ __forceinline__ Operand(const Parameters& p, Shared& shared, const Tile& t) : p(p), shared(shared) {
        if (!p.data) return;
        amax = operand_amax(IN_SECTIONS ? p.amaxes[t.section()] : largest_of(p.amaxes, p.count, shared.largest));
        if (IN_SECTIONS ? t.down + t.across + threadIdx.x : blockIdx.x + threadIdx.x) return;
        if (p.amax) p.amax[t.section()] = amax;
        if (p.turn) p.turn[t.section()] = (u32)p.seed[t.section()];
    }

    __device__ __forceinline__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        if (!p.data) return;
        const u64 key = p.seed[t.section()];
        const float overall = tensor_scale(amax);
        const int part = threadIdx.x % PARTS;
        const u32 minus = signs(part, (u32)key);
        const int own = COL ? t.lane_col : t.lane_row;  // this thread's first line
        const i64 size = COL ? (IN_SECTIONS ? t.line() : t.rows) : t.cols, blocks = (size + 127) / 128 * PARTS;
        const i64 block = (i64)(COL ? t.down : t.across) * PARTS + part;  // along the contraction of the section
        const i64 top = COL ? t.top() : 0, length = COL ? t.bottom() - top : size;
        const i64 lines = COL ? t.cols : t.end() - t.begin(), begin = COL ? t.lines() : t.begin();
#pragma unroll 1
        for (int first = 0; first < 128; first += LINES) {
            __syncthreads();
            if (own / LINES == first / LINES) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const u32 word = w[i][j / PER_WORD];
                        const Element element = (Element)(PER_WORD == 2 && j % 2 ? word >> 16 : word);
                        if (COL)
                            shared.lines.at(t.lane_row + i, t.lane_col % LINES + j) = element;
                        else
                            shared.lines.at(t.lane_col + j, t.lane_row % LINES + i) = element;
                    }
            }
            __syncthreads();
            const i64 line = (i64)(COL ? t.across : t.down) * 128 + first + threadIdx.x / PARTS;
            float v[16];
            shared.lines.take(part, v);
            uint4 drawn[1];
            const i64 along = COL ? block + p.offset / 16 : block, across = COL ? line : line + p.offset;
            philox((u32)along, (u32)across, COL, key, drawn);
            rotate(part, minus, v);
            u32 code;
            const uint2 codes = eden::encode(v, overall, drawn[0].x & 0xffffffu, code);
            if constexpr (EXACT) decode_exact(codes, code, v);
            if constexpr (EXACT && IN_SECTIONS) {
                const Factor f(__uint_as_float(amax));
#pragma unroll
                for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], f.first), f.last);
                const i64 left = (COL ? t.end() - t.begin() : size) - (block - part) * 16;  // from the group's first one on
                if (left < 128) {
                    unrotate(part, minus, v);
#pragma unroll
                    for (int i = 0; i < 16; ++i) v[i] = part * 16 + i < left ? v[i] : 0.0f;
                    rotate(part, minus, v);
                }
            }
            if (line >= lines || block >= (length + 127) / 128 * PARTS) continue;
            if constexpr (EXACT) {
                u16* to = (u16*)p.data + (begin + line) * size + top + block * 16;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    stream(to + 8 * half, make_uint4(narrow(v[8 * half], v[8 * half + 1]), narrow(v[8 * half + 2], v[8 * half + 3]),
                                                     narrow(v[8 * half + 4], v[8 * half + 5]), narrow(v[8 * half + 6], v[8 * half + 7])));
            } else {
                const i64 at = (begin + line) * blocks + top / 16 + block;
                stream(p.data + at * 8, codes);
                p.scale[at] = (u8)code;
            }
        }
    }
};

}  // namespace eden
