"""Reducing statistics over ranks: names are compared first, then one reduction follows for each way of combining. A
statistic of a logical weight is found by its name, so that no layout pairs the wrong statistics. A rank without a part
of the weight has a zero.
"""

from __future__ import annotations

import torch.distributed as dist

from lpq.calibration.errors import CalibrationError
from lpq.calibration.statistics import DTYPES, Statistics
from lpq.distributed.ranks import Ranks
from lpq.operations.reduce_statistics import reduce_max, reduce_sum


class Together(Ranks):
    """The ranks that calibrate one model; an error on any rank is a ``CalibrationError`` on all."""

    error = CalibrationError


def reduce(statistics: Statistics, ranks: Together) -> Statistics:
    """Return the statistics of all ranks together. Where ranks do not have the same ones, all raise, with the
    difference."""
    ranks.equal(
        [f"{name} {s.how} {[*s.value.shape]}" for name, s in statistics.items()],
        "the ranks have other statistics",
        "Build and convert the model alike on all of them, and have each forward pass go through the same layers",
    )
    group = ranks.group or dist.group.WORLD if ranks.many else None
    if group is None:
        return statistics
    reduced = Statistics()
    for how in DTYPES:
        values = {name: s.value for name, s in statistics.items() if s.how == how}
        of_all = (reduce_max if how == "max" else reduce_sum)([*values.values()], group)
        for name, value in zip(values, of_all, strict=True):
            reduced.take(name, value, how)
    return reduced
