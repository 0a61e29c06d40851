"""FP8's kernel for the row operands of several matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.kernels.launch_table import TableLaunch, bind_table, kernel_of_table, rounding
from lpq.kernels.tiles import pointer
from lpq.operations.binding import EncodeSeveral
from lpq_fp8.quantizer import FP8Quantizer

CODES = 4096
"""Codes that one block of threads writes."""
ENCODE = kernel_of_table("fp8/rows.cu", "encode_several")


def bind(
    side: FP8Quantizer, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> EncodeSeveral | None:
    """Bind an encoding with one scale for each matrix, which one block of threads, at least, writes."""
    if not all(stat.of_all for stat in side.stats):
        return None
    counts = [math.prod(shape) for shape in shapes]
    macros = f"LPQ_CODE={side.dtype.upper()}", f"LPQ_POW2={int(side.pow2_scales)}", *rounding(dtype)

    def at(
        values: Sequence[Tensor], stats: Sequence[Sequence[Tensor | None]], buffers: Sequence[Sequence[Tensor]]
    ) -> TableLaunch:
        lines = [
            ((*(pointer(t) for t in (x, codes, scale, amax)), count), max(1, -(-count // CODES)))
            for x, (amax,), (codes, scale), count in zip(values, stats, buffers, counts, strict=True)
        ]
        return bind_table(ENCODE, macros, lines, device)

    return at
