"""MXFP8 tile by tile, for operands that are written beside those of another format."""

from __future__ import annotations

import torch

from lpq.core.pairs import Job, Made, TileSide
from lpq.core.quantizer import Direction
from lpq.ops.cubins import csrc
from lpq.ops.tiles import TALL, pointer
from lpq_mxfp8.cuda import BLOCK
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.storage import ELEMENTS


def tile(quantizer: MXFP8Quantizer, direction: Direction) -> TileSide:
    """How either operand is made."""
    element = ELEMENTS[quantizer.dtype]

    def make(job: Job) -> Made:
        high, wide = job.shape
        data = job.x.new_empty(job.shape, dtype=element)
        scale = job.x.new_empty((high, -(-wide // BLOCK)), dtype=torch.uint8)
        amaxes = job.x.new_empty(scale.shape, dtype=torch.float32) if job.measure else None
        (given,) = job.stats
        parameters = data.data_ptr(), scale.data_ptr(), pointer(given), pointer(amaxes), pointer(job.words)
        return Made((data, scale), () if amaxes is None else (amaxes,), parameters)

    struct = f"mxfp8::{direction.capitalize()}<{quantizer.dtype.upper()}>"
    return TileSide(csrc() / "mxfp8/sides.cuh", struct, "PPPPP", make, tall=TALL, words=1)
