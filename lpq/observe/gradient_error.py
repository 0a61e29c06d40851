"""How far the gradients of a step move away from bf16's when layers are replayed by recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lpq.distributed.ranks import Ranks
from lpq.nn.stateful_layer import StatefulLayer
from lpq.observe.replay import Replay
from lpq.observe.sharing import device_of, is_shared
from lpq.operations.reduce_statistics import reduce_sum
from lpq.recipes import Recipe

Parts = Mapping[StatefulLayer, Recipe]
"""The recipes of some layers in a replay."""


class OverRanks:
    """Sums over the parameters of a model, and over the ranks that share it."""

    def __init__(self, model: nn.Module, options: Sequence[str]) -> None:
        """``options``: on which it depends what is replayed, and so must be the same on all ranks."""
        self._ranks = Ranks.of(None, is_shared(model), "replays")
        self._ranks.equal(options, "the ranks do not replay the same", "Call it alike on all of them")
        self._device = device_of(next(model.parameters()))

    def sum(self, values: Sequence[Tensor]) -> float:
        """Return the sum of these numbers."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        total = torch.stack([zero, *(v.double().to(self._device) for v in values)]).sum().reshape(1)
        group: Any = self._ranks.group or dist.group.WORLD if self._ranks.size > 1 else None
        return float(total if group is None else reduce_sum([total], group)[0])

    def share(self, parameter: Any) -> float:
        """The part of a parameter's sum that a rank adds: the ranks that have the same part of it share the sum."""
        parts = 1
        if isinstance(parameter, DTensor):
            dims = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            parts = math.prod(size for placement, size in dims if not placement.is_replicate())
        return parts / self._ranks.size

    def mean(self, value: float) -> float:
        """Return the mean over the ranks, each of which has a value of its own, as the loss of its share of a batch."""
        return self.sum([torch.tensor(value, dtype=torch.float64)]) / self._ranks.size


class GradientError:
    """The length of the error of gradients over the length of the exact gradients. Where there are several replays,
    each of a batch of its own, the mean gradients count: noise of random bits averages out, and the bias
    stays."""

    def __init__(self, ranks: OverRanks, replays: Sequence[Replay], exact: Parts) -> None:
        """``exact``: the recipes with which there is no error."""
        self._ranks, self._replays = ranks, replays
        runs = [replay.run(exact) for replay in replays]
        self.loss = ranks.mean(sum(loss for loss, _ in runs) / len(runs))
        """The exact loss, of all ranks."""
        self._exact = _mean([gradients for _, gradients in runs])
        self._shares = [ranks.share(parameter) for parameter in replays[0].parameters]
        self.size = self._length(self._exact)
        """The length of the exact gradients."""

    def of(self, parts: Parts) -> float:
        """Replay with these recipes and return the error."""
        return self.between([replay.run(parts)[1] for replay in self._replays])

    def between(self, runs: Sequence[Sequence[Tensor]]) -> float:
        """Return the error of the gradients of each replay: infinite where they are not finite, and where only the
        exact ones are all 0."""
        length = self._length([a.double() - b.double() for a, b in zip(_mean(runs), self._exact, strict=True)])
        if length == 0:
            return 0.0
        return length / self.size if math.isfinite(length) and self.size else math.inf

    def _length(self, gradients: Sequence[Tensor]) -> float:
        """The length of gradients of which each rank has some parts."""
        of_parts = zip(gradients, self._shares, strict=True)
        return math.sqrt(self._ranks.sum([g.double().square().sum() * share for g, share in of_parts]))


def _mean(runs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    if len(runs) == 1:
        return [*runs[0]]
    return [torch.stack([g.float() for g in each]).mean(0) for each in zip(*runs, strict=True)]
