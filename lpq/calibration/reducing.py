"""Reducing statistics over ranks: names are compared first, then one reduction follows for each way of combining. A
statistic of a logical weight is found by its name, so that no layout pairs the wrong statistics. A rank without a part
of the weight has a zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lpq.calibration.errors import CalibrationError
from lpq.calibration.statistics import DTYPES, How, Statistics
from lpq.distributed.ranks import Ranks
from lpq.operations.reduce_statistics import reduce_max


class Together(Ranks):
    """The ranks that calibrate one model; an error on any rank is a ``CalibrationError`` on all."""

    error = CalibrationError

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
    ranks.equal(
        [f"{name} {s.how} {[*s.value.shape]}" for name, s in statistics.items()],
        "the ranks have other statistics",
        "Build and convert the model alike on all of them, and have each forward pass go through the same layers",
    )
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
