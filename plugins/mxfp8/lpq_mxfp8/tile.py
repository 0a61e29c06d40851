"""MXFP8 tile by tile: operands that are written beside others, or that are made for a product without being encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpq.formats.format import Direction
from lpq.kernels.fresh import fresh
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import LOW, SQUARE, TALL
from lpq.operations.exact_form import Form
from lpq.operations.fused_pair import Job, Made, Make, TileSide
from lpq_mxfp8.cuda import bind_operand
from lpq_mxfp8.quantizer import MXFP8Quantizer


def tile(quantizer: MXFP8Quantizer, direction: Direction) -> TileSide:
    """How either operand is made."""
    bind = partial(bind_operand, quantizer)
    exact = exact_tile(quantizer, direction)  # which is its decoded value
    return _side(quantizer, direction, bind, shape=TALL, decoded=(exact.struct, exact.shape))


def exact_tile(quantizer: MXFP8Quantizer, direction: Direction) -> TileSide:
    """How the decoded operand is made, in bf16."""

    def bind(job: Job) -> Make:
        empty, memory = job.empty, fresh(job.shape, torch.bfloat16)

        def make(
            stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
        ) -> Made:
            matrix = empty(*memory)
            return Made((matrix,), (), (matrix.data_ptr(), 0, 0, 0))

        return make

    # Columns in bf16 are twice as long as in 8 bits: tiles are half as tall, and transposes take as much memory.
    return _side(quantizer, direction, bind, exact=Form(), shape=TALL if direction == "row" else SQUARE)


def _side(quantizer: MXFP8Quantizer, direction: Direction, bind: Callable[[Job], Make], **rest: Any) -> TileSide:
    flag = str("exact" in rest).lower()
    struct = f"mxfp8::{direction.capitalize()}<{quantizer.dtype.upper()},{flag}>"
    return TileSide(csrc() / "mxfp8/sides.cuh", struct, "PPPP", bind, least=LOW, **rest)
