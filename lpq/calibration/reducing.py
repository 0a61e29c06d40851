"""Reducing statistics over ranks: names are compared first, then one reduction follows for each way of combining.

A statistic of a logical weight is found by its name, so that no layout pairs the wrong ones. A rank that has no part of
it has a zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lpq.calibration.errors import CalibrationError
from lpq.calibration.statistics import DTYPES, How, Statistics
from lpq.distributed import agree
from lpq.operations.reduce_statistics import reduce_max
from lpq.registry.showing import listed

T = TypeVar("T")


class Together(agree.Ranks):
    """The ranks that calibrate one model; an error on any of them is a ``CalibrationError`` on all."""

    def as_error(self, raised: BaseException) -> CalibrationError:
        return raised if isinstance(raised, CalibrationError) else CalibrationError(agree.message(raised))

    def exchange(self, mine: T) -> list[T]:
        """Return an object of each rank, in the order of the ranks."""
        return self.all(lambda: mine)

    def combine(self, packed: Tensor, how: How) -> Tensor:
        """Return the largest values or the sums of a vector over the ranks."""
        if not self.many:
            return packed
        group = self.group or dist.group.WORLD
        assert group is not None
        if how == "max":
            return reduce_max([packed], group)[0]
        packed = packed.clone()
        dist.all_reduce(packed, op=dist.ReduceOp.SUM, group=group)
        return packed


def reduce(statistics: Statistics, ranks: Together) -> Statistics:
    """Return the statistics of all ranks together. Where ranks do not have the same ones, all raise, with the
    difference."""
    _check_names([f"{name} {s.how} {[*s.value.shape]}" for name, s in statistics.items()], ranks)
    reduced = Statistics()
    for how in DTYPES:
        values = {name: s.value for name, s in statistics.items() if s.how == how}
        for name, value in _reduced(values, ranks, how).items():
            reduced.take(name, value, how)
    return reduced


def _reduced(values: Mapping[str, Tensor], ranks: Together, how: How) -> dict[str, Tensor]:
    if not values:
        return {}
    packed = ranks.combine(torch.cat([value.reshape(-1) for value in values.values()]), how)
    parts = torch.split(packed, [value.numel() for value in values.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(values.items(), parts, strict=True)}


def _check_names(mine: list[str], ranks: Together) -> None:
    """Raise on all ranks alike unless they have the same statistics. Hashes travel first, and names only where these
    differ."""
    if len({*ranks.exchange(hashlib.sha256("\n".join(mine).encode()).hexdigest())}) == 1:
        return
    known = ranks.exchange(mine)
    other = next(rank for rank, names in enumerate(known) if names != known[0])
    words = [
        f"rank {one} has {listed(lacking)}, which rank {two} lacks"
        for one, two in ((0, other), (other, 0))
        if (lacking := [name.split()[0] for name in known[one] if name not in known[two]])
    ]
    raise CalibrationError(
        f"the ranks have other statistics: {'; '.join(words)}. Build and convert the model alike on all of them, and "
        "have each forward pass go through the same layers"
    )
