"""Whether a tensor can be divided over ranks and travel encoded: weights in equal shards, and matrices of which
tensor parallelism divides the rows or columns. It depends on global sizes only.

So every rank decides alike, and the report of a conversion can list the decisions.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Shard

from lpq.formats import Quantizer
from lpq.formats.layout import DIMENSIONS
from lpq.operations.cut import Cut, why_cut
from lpq.operations.derived_operands import derives_col, made_at_use, rounds_stochastically
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


@cache  # called before every gather
def why_not(quantizer: Quantizer, rows: int, ranks: int, stack: bool = False) -> str | None:
    """Why shards of a weight of ``rows`` rows, or matrices of a stack, cannot be encoded when it is gathered, not for
    one operand either; None if they can."""
    col = quantizer.side("col")
    if rounds_stochastically(quantizer) and not made_at_use(quantizer):
        return f"{quantizer} rounds stochastically, and each rank would draw random bits of its own"
    if quantizer.col_source == "row" and col.state:
        return f"{col} would have to remember statistics of the decoded row operand"
    if ranks > 1 and not stack and measures_again(quantizer.side("row"), col):
        return f"{quantizer} measures in two rounds, and weights are gathered after one"
    whole = why_whole(quantizer, rows, ranks, stack)
    return None if None in whole else whole[0]


Reasons = tuple[str | None, str | None]
"""Why the row operand, and the column operand, is encoded of the whole weight; None if it is encoded of shards."""


@cache
def why_whole(quantizer: Quantizer, rows: int, ranks: int, stack: bool = False) -> Reasons:
    """Why each operand cannot be encoded shard by shard. Such an operand is encoded where the weight arrives in high
    precision, in the directions that need it."""
    if derives_col(quantizer):
        reason = why_uncut(quantizer, rows, ranks, stack)
        return reason, reason
    row, col = (why_uncut(quantizer, rows, ranks, stack, directions) for directions in ((True, False), (False, True)))
    return row, col


def why_uncut(
    quantizer: Quantizer, rows: int, ranks: int, stack: bool = False, directions: tuple[bool, bool] = (True, True)
) -> str | None:
    """Why a weight of ``rows`` rows cannot be cut into shards of whole blocks for ``ranks`` ranks; None if it can.
    ``directions``: whether the row operand, and the column operand, is needed. A stack is cut between matrices."""
    row, col = quantizer.side("row"), quantizer.side("col")
    derived = derives_col(quantizer)
    for side, one in ((row, directions[0]), (col, directions[1] and not made_at_use(quantizer))):
        if one and side.rotation is not None and side.rotation.drawn and (derived or ranks > 1):
            return f"each pass draws the signs by which {side} is rotated, and shards know none in common"
    if rows % ranks:
        return f"its {rows} {'matrices' if stack else 'rows'} over {ranks} ranks are uneven"
    if ranks == 1 or stack:
        return None
    shard = rows // ranks
    sides = [(row, 0)] if directions[0] or derived else []
    sides += [(col, 1)] if directions[1] and not derived else []
    return why_cut(sides, shard, f"of its {rows} rows")


def why_not_placed(quantizer: Quantizer, tensor: DTensor) -> str | None:
    """Why the row operands of parts of a tensor, which is placed over ranks, are no parts of the whole row operand;
    None if they are. Parts may be of different sizes."""
    sharded = [(p, n) for p, n in zip(tensor.placements, tensor.device_mesh.shape, strict=True) if not p.is_replicate()]
    cuts = [getattr(p, "dim", None) for p, _ in sharded]  # another class than Shard has it where two cut one dimension
    for (placement, ranks), cut in zip(sharded, cuts, strict=True):
        once = type(placement) is Shard and cuts.count(cut) == 1
        if cut not in (0, tensor.dim() - 1) or (cut and not once):
            return f"it is placed by {placement}, and neither by its first dimension nor by its last"
        dim, size = int(cut == tensor.dim() - 1), tensor.shape[cut]
        per_rank = (-(-size // ranks) if once else 1) * (1 if dim else math.prod(tensor.shape[1:-1]))
        if ranks > 1 and (reason := why_cut([(quantizer, dim)], per_rank, DIMENSIONS[dim])) is not None:
            return reason
        common = [stat.name for stat in quantizer.stats if stat.block[dim] is None]
        if common and (len(sharded) > 1 or dim or -(-size // ranks) * (ranks - 1) >= size > 0):
            return f"its statistic {common[0]!r} is of more than a part, and the parts are not equal rows of one group"
    return None


def sent_bytes(
    quantizer: Quantizer, rows: int, cols: int, dtype: torch.dtype, *, stays: bool = False, stored: bool = False,
    whole: Reasons = (None, None),
) -> tuple[int, int]:  # fmt: skip
    """The bytes that all ranks together send of a weight in forward, and in backward.

    ``stays``: whether it stays gathered from forward to backward, so that forward gathers both operands. ``stored``: as
    for ``operand_bytes``. ``whole``: the operands that are encoded where the weight arrives in high precision.
    """
    high = rows * cols * dtype.itemsize
    sizes = []
    for directions in [(True, True)] if stays else [(True, False), (False, True)]:
        operands = operand_bytes(quantizer, rows, cols, dtype, *directions)
        sizes.append(operands if stored else high if why_in(whole, directions) else min(operands, high))
    return sizes[0], 0 if stays else sizes[1]


def why_in(whole: Reasons, directions: tuple[bool, bool]) -> str | None:
    """Why a weight travels in high precision where these operands are wanted; None if no operand asks for it."""
    return next((reason for reason, needed in zip(whole, directions, strict=True) if needed and reason), None)


def operand_bytes(quantizer: Quantizer, rows: int, cols: int, dtype: torch.dtype, row: bool, col: bool) -> int:
    """The bytes of these operands of a weight that travel. If the weight has fewer bytes in high precision, it travels
    in their place and is encoded where it arrives, unless it is stored quantized."""
    derived = derives_col(quantizer)
    rows_sent = _bytes_of(quantizer.side("row"), 0, rows, cols, dtype) if row or derived else 0
    return rows_sent + (_bytes_of(quantizer.side("col"), 1, cols, rows, dtype) if col and not derived else 0)


def _bytes_of(side: Quantizer, dim: int, rows: int, cols: int, dtype: torch.dtype) -> int:
    layout = side.layout
    return sum(math.prod(b.grid(rows, cols)) * (b.dtype or dtype).itemsize for b in layout if b.unit(dim) is not None)


def why_high(
    quantizer: Quantizer, row: bool, col: bool, cut: Cut, rows: int, cols: int, dtype: torch.dtype
) -> str | None:
    """Why a tensor ``[rows, cols]`` whose rows are divided over ranks is gathered before it is encoded, and not after;
    None if it is gathered encoded. It follows from sizes and layouts: all ranks decide alike. ``row`` and ``col``:
    whether these operands are wanted together."""
    side = quantizer.side("col")
    if quantizer.col_source == "row" and col and (side.state or side.stochastic) and not made_at_use(quantizer):
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
    encoded = row, None if derives_col(quantizer) else col
    apart = any(spans(a) and not spans(b) for a, b in zip(along(cut, *encoded), declared(*encoded), strict=True))
    alone = quantizer.col_source == "row" and not made_at_use(quantizer)  # without the other ranks
    if apart or (alone and any(map(spans, along(cut, None, col)))):
        return f"tensor parallelism shards it, too, and cuts what a statistic of {quantizer} covers"
    return cut.why_not(quantizer, True, True)
