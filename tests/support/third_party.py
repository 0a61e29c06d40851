"""A format of a third party, as kernels of lpq know it: a struct of CUDA C++ that encodes a tile, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpq.formats.elements import cast_float8
from lpq.kernels.fresh import fresh
from lpq.operations.fused_pair import Job, Made, Make, TileSide

HEADER = """
#include "bytes.cuh"
#include "side.cuh"

namespace theirs {
struct Parameters { u8* data; alignas(8) float factor; };

struct Row : Side {
    typedef theirs::Parameters Parameters;
    struct Shared {};
    const Parameters p;
    __device__ Row(const Parameters& p, Shared&, const Tile&) : p(p) {}
    __device__ void encode(const Tile& t, const u32 (&w)[ROWS][WORDS]) {
        for (int i = 0; i < ROWS; ++i) {
            u32 low, high;
            scale_row<E5M2>(w[i], p.factor, low, high);
            store_row(t, p.data, i, low, high);
        }
    }
};
}
"""
FACTOR = 0.25


def row_side(folder: Path) -> TileSide:
    """Its row operand: E5M2 with one constant factor. ``folder`` gets the header."""
    header = folder / "theirs.cuh"
    header.write_text(HEADER)

    def bind(job: Job) -> Make:
        empty, memory = job.empty, fresh(job.shape, torch.float8_e5m2)

        def make(*given: Any) -> Made:
            data = empty(*memory)
            return Made((data,), (), (data.data_ptr(), FACTOR))

        return make

    return TileSide(header, "theirs::Row", "Pf", bind)


def row_operand(x: Tensor) -> Tensor:
    """The codes of a matrix, by the cast of lpq that the struct calls."""
    return cast_float8(x.float() * FACTOR, torch.float8_e5m2)
