"""The measurement of shards of weights that are gathered quantized: several in one launch where a kernel can.

Ranks reduce the statistics together, which makes them statistics of whole weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.distributed.gather_encoder import Sides
from lpq.distributed.several_matrices import Measurements, can_measure_together, measure_together
from lpq.distributed.shard import WeightShard, plain_each
from lpq.distributed.weight_gather import Gather, Measured
from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.operations.measuring import measure
from lpq.operations.operators import can_bypass_dispatcher
from lpq.operations.part_encoders import along
from lpq.operations.reduce_statistics import Reductions, spans
from lpq.tensor import QuantizedTensor
from lpq.torch_private import fsdp
from lpq.torch_private.tensors import version_of


def stale(gathers: Sequence[Gather], shards: Sequence[Tensor]) -> list[Gather]:
    """Select the weights whose shard was written to, or whose quantizer changed, since it was measured; stored weights
    never are."""
    gathers_due: list[Gather] = []
    for gather, shard in zip(gathers, shards, strict=True):
        record, quantizer = gather.measured, (gather.judged or gather.judge()).quantizer
        if not isinstance(shard, QuantizedTensor) and (
            record is None
            or record.local() is not shard
            or (isinstance(shard, WeightShard) and record.writes != (shard.writes.count, version_of(shard.held)))
            or (record.quantizer is not quantizer and record.quantizer != quantizer)
        ):
            gathers_due.append(gather)
    return gathers_due


def measure_all(gathers: Sequence[Gather], reductions: Reductions, bound: Measurements) -> None:
    """Measure this rank's shards of these weights. The reductions turn the statistics into statistics of whole
    weights. ``bound``: the launches of earlier measurements."""
    records: list[tuple[Gather, Measured]] = []
    alike: dict[tuple[object, ...], tuple[Sides, list[tuple[Gather, Tensor]]]] = {}
    shards = fsdp.shards(gather.site for gather in gathers)
    for gather, local, x in zip(gathers, shards, plain_each(shards), strict=True):
        quantizer, sides = gather.judged or gather.judge()
        writes = (local.writes.count, version_of(x)) if isinstance(local, WeightShard) else (0, 0)
        records.append((gather, Measured(weakref.ref(local), writes, quantizer, sides)))
        gather.measured = None  # until they are reduced each rank has others
        gather.stats = gather.spanning = []
        if sides is None or not isinstance(local, WeightShard):
            continue
        gather.stats = gather.spanning = [None] * len(sides.stats)
        if sides.measured:
            key = id(sides), x.dtype, x.device, gather.where, gather.site.parallel
            alike.setdefault(key, (sides, []))[1].append((gather, x))
    with torch.no_grad():
        for sides, members in alike.values():
            if _are_together(sides, *members[0]):
                _measure_together(sides, members, reductions, bound)
            else:
                _measure_each(sides, members, reductions)

    def reduced() -> None:
        for gather, measured in records:
            gather.measured, gather.version = measured, object()

    reductions.afterwards(reduced)


def _are_together(sides: Sides, gather: Gather, x: Tensor) -> bool:
    """Whether shards like ``x`` are measured in one launch. A state may need statistics of a shard by itself."""
    if sides.stack or x.device != gather.site.device or not can_bypass_dispatcher(x):
        return False
    if sides.remembers and not all(sides.spans):
        return False
    operands: tuple[tuple[Direction, Quantizer | None], ...] = (("row", sides.row), ("col", sides.col))
    return all(side is None or can_measure_together(side, direction, x.dtype, x.device) for direction, side in operands)


def _measure_each(sides: Sides, members: Sequence[tuple[Gather, Tensor]], reductions: Reductions) -> None:
    """Measure shards one by one."""
    (dtype, _, group), parallel = members[0][0].where, members[0][0].site.parallel
    of_parts = along(members[0][0].cut, sides.row, sides.col)
    for gather, x in members:
        stats = gather.keep(measure(gather.prepared(x), sides.row, sides.col, dtype=dtype))
        if not sides.stack:  # no statistic of it spans several shards
            reductions.add_stats(sides.stats, stats, group, 1, (gather.layer,))
        if not sides.stack and parallel is not None:
            reductions.add_stats(of_parts, stats, parallel[0], 1, (gather.layer,))
        gather.stats = [*stats]
        gather.spanning = [s if spans else None for s, spans in zip(stats, sides.spans, strict=True)]


def _measure_together(
    sides: Sides, members: Sequence[tuple[Gather, Tensor]], reductions: Reductions, bound: Measurements
) -> None:
    """Measure shards in one launch for each operand, as far as their statistics reach beyond them."""
    owners, xs = zip(*members, strict=True)
    (dtype, _, group), count, parallel = owners[0].where, len(sides.row.stats), owners[0].site.parallel
    of_parts, layers = along(owners[0].cut, sides.row, sides.col), tuple(gather.layer for gather in owners)
    parts: tuple[tuple[Direction, Quantizer | None, slice], ...] = (
        ("row", sides.row, slice(0, count)),
        ("col", sides.col, slice(count, None)),
    )
    for direction, side, part in parts:
        if side is None or not any(sides.spans[part]):
            continue
        measured = measure_together(bound, side, direction, xs, dtype, owners)
        reductions.add([measured.all], group, [layers])
        if parallel is not None and any(map(spans, of_parts[part])):
            reductions.add([measured.all], parallel[0], [layers])
        for gather, stats in zip(owners, measured.stats, strict=True):
            gather.stats[part] = stats
