"""Whether a sharded matrix is gathered before it is encoded, or after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lpq.distributed.shardability import operand_bytes
from lpq.formats import Quantizer
from lpq.operations.cut import Cut
from lpq.operations.derived_operands import derives_col
from lpq.operations.part_encoders import along
from lpq.operations.reduce_statistics import spans
from lpq.operations.sides import declared, measures_again
from lpq.operations.states import state_names

if TYPE_CHECKING:
    from lpq.torch_private.fsdp import Site

MOST = 1.1
"""The bytes of two operands of a tensor that are sent, at most, as a share of its own in high precision. Somewhat more
than those is still faster: the second operand travels while the first is multiplied, and each rank encodes its own part
alone. One operand by itself has at most the tensor's bytes."""


def why_high(
    quantizer: Quantizer, row: bool, col: bool, cut: Cut, rows: int, cols: int, dtype: torch.dtype
) -> str | None:
    """Why a tensor ``[rows, cols]`` whose rows are divided over ranks is gathered before it is encoded, and not after;
    None if it is gathered encoded. It follows from sizes and layouts: all ranks decide alike. ``row`` and ``col``:
    whether these operands are wanted together."""
    side = quantizer.side("col")
    if quantizer.col_source == "row" and col and (side.state or side.stochastic):
        return f"{quantizer} makes its column operand of all that the row operand decodes to"
    reason = cut.why_not(quantizer, row, col)
    if reason is not None:
        return reason
    share = operand_bytes(quantizer, rows, cols, dtype, row, col) / max(rows * cols * dtype.itemsize, 1)
    if share <= (MOST if row and col else 1):
        return None
    return f"the operands that are wanted together would be {share:.2f} of that"


def part_of(site: Site) -> Cut | None:
    """How tensor parallelism divides a weight of which FSDP2 gathers one part; None: it does not."""
    if site.parallel is None:
        return None
    group, dim = site.parallel
    return Cut(dim, group.rank(), group.size(), site.shape[dim])


def why_not_of_shards(cut: Cut, quantizer: Quantizer) -> str | None:
    """Why a part of a weight that is divided in this way cannot be gathered quantized from shards of its rows; None if
    it can. A statistic that spans these ranks must span the shards, too: it is reduced before the gather."""
    row, col = quantizer.side("row"), quantizer.side("col")
    if state_names(quantizer) or measures_again(row, col):
        return f"tensor parallelism shards it, too, and {quantizer} remembers statistics or measures twice"
    made = row, None if derives_col(quantizer) else col
    apart = any(spans(a) and not spans(b) for a, b in zip(along(cut, *made), declared(*made), strict=True))
    if apart or (quantizer.col_source == "row" and any(map(spans, along(cut, None, col)))):
        return f"tensor parallelism shards it, too, and cuts what a statistic of {quantizer} covers"
    return cut.why_not(quantizer, True, True)
