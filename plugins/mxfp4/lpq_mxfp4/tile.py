"""MXFP4 tile by tile: operands that are written beside others, or that are made for a product without being encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpq.formats.format import Direction
from lpq.kernels.fresh import fresh
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import SQUARE
from lpq.operations.exact_form import Form
from lpq.operations.fused_pair import Job, Made, Make, TileSide
from lpq_mxfp4.cuda import DRAWN, PARAMETERS, bind_operand, struct_of
from lpq_mxfp4.quantizer import MXFP4Quantizer


def tile(quantizer: MXFP4Quantizer, direction: Direction) -> TileSide | None:
    """How an operand is made; none that is rotated is a row operand."""
    decoded = (struct_of(quantizer, direction, True), SQUARE)
    return _side(quantizer, direction, partial(bind_operand, quantizer), decoded=decoded)


def exact_tile(quantizer: MXFP4Quantizer, direction: Direction) -> TileSide | None:
    """How the decoded operand is made, in bf16, in the basis in which it is stored."""

    def bind(job: Job) -> Make:
        empty, memory, offset = job.empty, fresh(job.shape, torch.bfloat16), job.offset

        def make(
            stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
        ) -> Made:
            matrix = empty(*memory)
            return Made((matrix,), (), (matrix.data_ptr(), 0, 0, 0, 0 if seed is None else seed.data_ptr(), offset))

        return make

    return _side(quantizer, direction, bind, exact=Form())


def _side(quantizer: MXFP4Quantizer, direction: Direction, bind: Callable[[Job], Make], **rest: Any) -> TileSide | None:
    if quantizer.rht and direction == "row":
        return None
    aligned = DRAWN if quantizer.stochastic and direction == "col" else 1
    struct = struct_of(quantizer, direction, "exact" in rest)
    return TileSide(csrc() / "mxfp4/sides.cuh", struct, PARAMETERS, bind, aligned=aligned, **rest)
