"""An operand of each of several fp32 matrices of any shapes, made tile by tile in one launch.

The kernel is the one that writes operands of any two formats from one read (``fused_pair``), with one of them and a
table of matrices. So each format that has a ``tile`` is encoded so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.kernels.cuda import SLOTS, CudaKernel
from lpq.kernels.launch_table import TableLaunch, bind_table
from lpq.kernels.sections import MACRO
from lpq.kernels.tiles import SQUARE, Shape, covering, divides, reading, tiles
from lpq.operations.binding import ALIGNED, EncodeSeveral
from lpq.operations.fused_pair import NOTHING, Job, TileSide, pair_macros, side_of

MACROS = MACRO, "LPQ_SEVERAL", "LPQ_ROW_MAJOR"
"""Each matrix is a stack of one. Its operand is sent, and lies row by row."""


def several_side(quantizer: Quantizer, direction: Direction, device: torch.device) -> TileSide | None:
    """How an operand of several matrices is made; None where a launch makes one only."""
    side = side_of(quantizer, direction, device)
    return None if isinstance(side, str) or quantizer.stochastic else side


def bind_side(
    side: TileSide, direction: Direction, shapes: Sequence[Shape | tuple[int, int]], dtype: torch.dtype,
    device: torch.device,
) -> EncodeSeveral:  # fmt: skip
    """Bind this side of matrices of these shapes, which are rounded to ``dtype``. The first of their statistics must
    be given if the side needs it, and no other."""
    shape, of_row = side.shape, direction == "row"
    if of_row:  # a smaller tile holds more of them at a time; tall ones are for what is written along columns
        shape = min(shape, SQUARE)
    jobs = [Job((high, wide) if of_row else (wide, high), dtype, device) for high, wide in shapes]
    makes = [side.bind(job) for job in jobs]
    whole = all(divides(rows, cols, shape) for rows, cols in shapes)
    sides = (side.compiled, NOTHING) if of_row else (NOTHING, side.compiled)
    macros = *reading(torch.float32, dtype), *MACROS, *pair_macros(*sides)

    def at(
        matrices: Sequence[Tensor], stats: Sequence[Sequence[Tensor | None]], buffers: Sequence[Sequence[Tensor]]
    ) -> TableLaunch:
        lines = []
        for x, (rows, cols), make, own_stats, into in zip(matrices, shapes, makes, stats, buffers, strict=True):
            fields = _words(side.parameters, make((), own_stats[0] if own_stats else None, None, into).parameters)
            parameters = (*fields, 0) if of_row else (0, *fields)
            lines.append(((x.data_ptr(), *parameters, rows, cols), tiles(rows, cols, shape)))
        aligned = all(x.data_ptr() % ALIGNED == 0 for x in matrices)
        return bind_table(_kernel(shape), (*macros, *covering(shape, whole and aligned)), lines, device)

    return at


@cache
def _kernel(shape: Shape) -> CudaKernel:
    return CudaKernel("common/pair.cu", "pair_several", "Pq", threads=shape.tall * shape.wide // 64, waits=True)


def _words(letters: str, values: Sequence[float]) -> tuple[int, ...]:
    """Fields of 8 bytes each, as the integers that a table has."""
    fields = struct.pack("<" + "".join(SLOTS[letter] for letter in letters), *values)
    return struct.unpack(f"<{len(letters)}q", fields)
