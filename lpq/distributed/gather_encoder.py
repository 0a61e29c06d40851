"""The decisions on how a weight is encoded for its gathers, each made once: a gather then only launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.distributed.shardability import operand_bytes
from lpq.formats import Quantizer
from lpq.formats.layout import Stat
from lpq.formats.stacks import is_stack
from lpq.kernels.table import kernels_allowed
from lpq.operations.binding import Encoding, on_device
from lpq.operations.bound import bind_run
from lpq.operations.derived_operands import derives_col
from lpq.operations.operands import moves, recalls, state_names
from lpq.operations.operators import can_bypass_dispatcher
from lpq.operations.quantizing import quantize
from lpq.operations.reduce_statistics import spans
from lpq.operations.sides import declared
from lpq.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Buffers = Sequence[Tensor]
"""The buffers of an operand, in the order of its layout; none of one that is not encoded."""
Encode = Callable[[Tensor, Sequence[Tensor | None]], tuple[Buffers, Buffers]]
"""``encode(x, stats)``: the row operand and the column operand, with statistics in the order of ``Sides.stats``."""


class Sides(NamedTuple):
    """The operands that are encoded from shards of a weight, and the statistics that they need."""

    quantizer: Quantizer
    row: Quantizer
    col: Quantizer | None
    """None: the column operand follows from the row operand."""
    stats: list[tuple[Stat, int]]
    """The statistics, in the order of ``declared``."""
    remembers: bool
    """Whether the layer has a state of the weight, which has some of them."""
    measured: bool
    """Whether shards are measured before they are gathered: for a statistic that spans them, or for the state."""


@cache
def sides_of(quantizer: Quantizer, stack: bool) -> Sides:
    """The operands that are encoded from shards, or from some matrices of a stack."""
    row, col = quantizer.side("row"), None if derives_col(quantizer) else quantizer.side("col")
    stats = declared(row, col)
    known = recalls(quantizer, row, col)
    spanned = not stack and any(spans(d) and not k for d, k in zip(stats, known, strict=True))
    return Sides(quantizer, row, col, stats, bool(state_names(quantizer)), spanned or moves(quantizer, row, col))


class Way(NamedTuple):
    """How a weight is gathered in one direction, or in both."""

    row: bool
    """Whether the row operand is wanted; ``col`` likewise."""
    col: bool
    sends_row: bool
    """Whether the row operand is encoded and sent: it is wanted, or the column operand follows from it."""
    sends_col: bool
    high: bool
    """Whether the weight travels in high precision, as its operands have more bytes."""
    matrices: slice | None
    """The matrices of a stack that a shard has; None where the weight is a matrix."""
    encode: Encode | None
    """Encodes a shard, or the whole where it travels in high precision; None: it is stored quantized."""


def way_of(
    sides: Sides,
    wanted: tuple[bool, bool],
    shape: tuple[int, ...],
    group: ProcessGroup,
    x: Tensor,
    dtype: torch.dtype,
    given: Sequence[bool],
) -> Way:
    """Decide how a weight is gathered by its group.

    ``shape``, ``dtype``: of the whole weight. ``x``: a shard of it as it is encoded, or as it is stored. ``given``: for
    each statistic, whether it is known before."""
    row = sides.row if wanted[0] or sides.col is None else None
    col = sides.col if wanted[1] else None
    matrices, count = None, x.shape[0]
    if is_stack(shape):
        matrices = slice(group.rank() * count, (group.rank() + 1) * count)
    way = Way(*wanted, row is not None, col is not None, False, matrices, None)
    if isinstance(x, QuantizedTensor):
        return way
    rows, cols = shape[-2:]
    sent = operand_bytes(sides.quantizer, rows, cols, dtype, *wanted)
    if group.size() > 1 and sent > rows * cols * dtype.itemsize:
        return way._replace(high=True, encode=_bind(sides, row, col, shape, dtype, dtype, x.device, given))
    return way._replace(encode=_bind(sides, row, col, x.shape, x.dtype, dtype, x.device, given))


_run_of = registry.cached_few(lambda e, kernels: bind_run(e))
"""``bind_run`` for all weights of a model that are encoded alike."""


def _bind(
    sides: Sides,
    row: Quantizer | None,
    col: Quantizer | None,
    shape: Sequence[int],
    held: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    given: Sequence[bool],
) -> Encode:
    count = len(sides.row.stats)
    of_them = slice(0 if row is not None else count, len(sides.stats) if col is not None else count)
    known = tuple(given[of_them])
    run = None
    if not is_stack(shape):
        with on_device(device):
            e = Encoding(row, col, (shape[0], shape[1]), held, dtype, device, known if True in known else ())
            run = _run_of(e, kernels_allowed())

    def encode(x: Tensor, stats: Sequence[Tensor | None]) -> tuple[Buffers, Buffers]:
        if run is not None and can_bypass_dispatcher(x):
            with on_device(device):
                return run(x, stats[of_them], None)[:2]
        first, second, _ = quantize(x, stats[of_them], row, col, dtype=dtype)
        return first.tensors() if first is not None else (), second.tensors() if second is not None else ()

    return encode
