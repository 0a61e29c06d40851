"""Statistics by name, and their reduction over ranks.

A statistic of a logical weight is found by its name, so that no layout pairs the wrong statistics. Names are compared
first. A rank without a part of the weight has a zero.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lpq.calibration.errors import CalibrationError
from lpq.distributed.ranks import Ranks
from lpq.operations.reduce_statistics import reduce_max, reduce_sum

How = Literal["max", "sum"]
DTYPES: dict[How, torch.dtype] = {"max": torch.float32, "sum": torch.int64}
"""The dtype of a statistic decides how values of several batches, shards and ranks are combined. ``max``: of
non-negative numbers, where NaN is larger than all. ``sum``: of counts. Both are exact in any order, as no mean is."""


class Together(Ranks):
    """The ranks that calibrate one model; an error on any rank is a ``CalibrationError`` on all."""

    error = CalibrationError


class Statistics(dict[str, Tensor]):
    """Statistics by name: of a logical weight, or of the inputs of a layer, whichever rank has them."""

    def take(self, name: str, value: Tensor) -> None:
        """Take one more value into a statistic."""
        if value.dtype not in DTYPES.values():
            raise TypeError(f"{name}: a statistic is of one of {[*DTYPES.values()]}, and this is {value.dtype}")
        if name in self:
            before = self[name]
            value = before + value if value.dtype == DTYPES["sum"] else torch.maximum(before, value)
        self[name] = value

    def by_how(self) -> dict[How, dict[str, Tensor]]:
        """The statistics by how they are combined, in the order of their names: the same on all ranks."""
        return {how: {name: self[name] for name in sorted(self) if self[name].dtype == DTYPES[how]} for how in DTYPES}


def reduce(statistics: Statistics, ranks: Together) -> Statistics:
    """Return the statistics of all ranks together, with one reduction for each way of combining. Where ranks do not
    have the same ones, all raise, with the difference."""
    each = statistics.by_how()
    ranks.equal(
        sorted(f"{name} {how} {[*value.shape]}" for how, values in each.items() for name, value in values.items()),
        "the ranks have other statistics",
        "Build and convert the model alike on all of them, and have each forward pass go through the same layers",
    )
    group = ranks.group or dist.group.WORLD if ranks.many else None
    if group is None:
        return statistics
    reduced = Statistics()
    for values, reduction in ((each["max"], reduce_max), (each["sum"], reduce_sum)):
        reduced.update(zip(values, reduction([*values.values()], group), strict=True))
    return reduced
