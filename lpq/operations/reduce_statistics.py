"""Combining statistics across ranks: one MAX over whatever covers data of more than one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lpq.formats.layout import Stat
from lpq.torch_private.operators import copy_each

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lpq.formats.format import Quantizer

Declared = tuple[Stat, int]
"""A statistic, and which dimension of its operand the ranks share out: 0 of a row operand, 1 of a column operand."""


def spans(declared: Declared) -> bool:
    """Whether one element of the statistic covers data of several ranks."""
    stat, dim = declared
    return stat.block[dim] is None


def reduce_stats(declared: Sequence[Declared], stats: list[Tensor], group: ProcessGroup) -> None:
    """Reduce, in one collective, those statistics whose elements span ranks; ``stats`` is changed in place."""
    spanning = [i for i, d in enumerate(declared) if spans(d)]
    for i, reduced in zip(spanning, reduce_max([stats[i] for i in spanning], group), strict=True):
        stats[i] = reduced


def reduce_max(values: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """The MAX over the ranks of these tensors of non-negative fp32 values, in one collective.

    A non-negative float orders as its bits do, and NaN above infinity: so the bits are reduced, as integers, because
    a floating-point MAX may lose a NaN.
    """
    import torch.distributed as dist

    if not values:
        return []
    flat = torch.cat([v.reshape(-1) for v in values]).abs().view(torch.int32)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    parts = torch.split(flat.view(torch.float32), [v.numel() for v in values])
    return [part.view(v.shape) for part, v in zip(parts, values, strict=True)]


class Reductions:
    """Tensors to be made the MAX over ranks: one collective for all of each set of ranks and each device."""

    def __init__(self) -> None:
        self._within: dict[tuple[object, ...], tuple[ProcessGroup, list[Tensor]]] = {}
        self._across: dict[tuple[object, ...], tuple[ProcessGroup, list[Tensor]]] = {}
        self._afterwards: list[Callable[[], None]] = []

    def add(self, values: Sequence[Tensor], group: ProcessGroup, across: ProcessGroup | None = None) -> None:
        """Reduce these in place over ``group``; afterwards over ``across``, if there is one."""
        for reduced, over in ((self._within, group), (self._across, across)):
            if over is not None and over.size() > 1:
                ranks = same_ranks(over)
                for value in values:
                    reduced.setdefault((ranks, value.device), (over, []))[1].append(value)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Have this called when all are reduced, and not if something raises before."""
        self._afterwards.append(call)

    @torch.no_grad()
    def run(self) -> None:
        for group, values in [*self._within.values(), *self._across.values()]:
            copy_each(values, reduce_max(values, group))
        for call in self._afterwards:
            call()


def same_ranks(group: ProcessGroup) -> tuple[int, ...]:
    """The ranks of a group: what groups have in common over which one reduction does for all."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


def check_shard(row: Quantizer | None, col: Quantizer | None, declared: Sequence[Declared], rows: int) -> None:
    """Refuse equal shards of ``rows`` rows that cut a block, or what must not be cut. Every rank has as many, so every
    rank refuses."""
    for side, dim in ((row, 0), (col, 1)):
        if side is not None and (reason := side.why_no_parts(dim)) is not None:
            raise ValueError(
                f"a shard has no operand that is a part of the whole tensor's: {reason}; quantize the whole"
            )
    covered = [(f"statistic {stat.name!r} covers", stat.block[dim]) for stat, dim in declared]
    for side, dim in ((row, 0), (col, 1)):
        if side is not None:
            covered += [(f"buffer {buffer.name!r} has", buffer.unit(dim)) for buffer in side.layout]
    for what, block in covered:
        if block is not None and rows % block:
            raise ValueError(
                f"a shard of {rows} rows cuts the blocks of {block} rows that {what}: "
                f"shard by multiples of {block} rows, or quantize before sharding"
            )
