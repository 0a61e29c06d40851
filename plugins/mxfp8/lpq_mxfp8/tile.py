"""MXFP8 tile by tile: operands that are written beside others, or that are made for a product without being encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lpq.formats.format import Direction
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import SQUARE, TALL, by_columns, pointer
from lpq.operations.exact_form import Form
from lpq.operations.fused_pair import Job, Made, TileSide
from lpq_mxfp8.cuda import BLOCK
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.reference import ELEMENTS


def tile(quantizer: MXFP8Quantizer, direction: Direction) -> TileSide:
    """How either operand is made."""

    def make(job: Job) -> Made:
        high, wide = job.shape
        if job.into is not None:
            return Made(job.into, (), (*map(pointer, job.into), 0, 0, 0)[:4])
        data = job.x.new_empty(job.shape, dtype=ELEMENTS[quantizer.dtype])
        scale = by_columns(job.x, high, -(-wide // BLOCK), torch.uint8)
        amaxes = job.x.new_empty(scale.shape, dtype=torch.float32) if job.measure else None
        (given,) = job.stats
        parameters = (
            data.data_ptr(), scale.data_ptr(), 0 if given is None else given.data_ptr(),
            0 if amaxes is None else amaxes.data_ptr(),
        )  # fmt: skip
        return Made((data, scale), () if amaxes is None else (amaxes,), parameters)

    exact = exact_tile(quantizer, direction)  # which is what it decodes to
    return _side(quantizer, direction, make, shape=TALL, decoded=(exact.struct, exact.shape))


def exact_tile(quantizer: MXFP8Quantizer, direction: Direction) -> TileSide:
    """The same of what the operand stands for, in bf16."""

    def make(job: Job) -> Made:
        matrix = job.x.new_empty(job.shape, dtype=torch.bfloat16)
        return Made((matrix,), (), (matrix.data_ptr(), 0, 0, 0))

    # Columns in bf16 are twice as long as in 8 bits: tiles are half as tall, and transposes take as much memory.
    return _side(quantizer, direction, make, exact=Form(), shape=TALL if direction == "row" else SQUARE)


def _side(quantizer: MXFP8Quantizer, direction: Direction, make: Callable[[Job], Made], **rest: Any) -> TileSide:
    flag = str("exact" in rest).lower()
    struct = f"mxfp8::{direction.capitalize()}<{quantizer.dtype.upper()},{flag}>"
    return TileSide(csrc() / "mxfp8/sides.cuh", struct, "PPPP", make, **rest)
