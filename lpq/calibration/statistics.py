"""Statistics by name, each with the way in which its values of several batches, shards and ranks are combined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

How = Literal["max", "sum"]
"""``max``: of non-negative fp32 values, where NaN is larger than all. ``sum``: of int64 counts. Both are exact in any
order, as no mean is."""
DTYPES: dict[How, torch.dtype] = {"max": torch.float32, "sum": torch.int64}


class Statistic(NamedTuple):
    """One statistic of everything that was taken so far."""

    value: Tensor
    how: How


class Statistics:
    """Statistics by name: of a logical weight, or of the inputs of a layer, whichever rank has them."""

    def __init__(self) -> None:
        self._all: dict[str, Statistic] = {}

    def take(self, name: str, value: Tensor, how: How) -> None:
        """Take one more value into a statistic."""
        if value.dtype != DTYPES[how]:
            raise TypeError(f"{name}: a {how} is of {DTYPES[how]}, and this is {value.dtype}")
        before = self._all.get(name)
        if before is not None:
            value = torch.maximum(before.value, value) if how == "max" else before.value + value
        self._all[name] = Statistic(value, how)

    def __getitem__(self, name: str) -> Tensor:
        return self._all[name].value

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def __len__(self) -> int:
        return len(self._all)

    def items(self) -> Iterator[tuple[str, Statistic]]:
        """All statistics, in the order of their names: the same on all ranks."""
        yield from sorted(self._all.items())

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Plain tensors on the CPU, by their way of combining and by name."""
        tensors: dict[str, dict[str, Tensor]] = {how: {} for how in DTYPES}
        for name, statistic in self.items():
            tensors[statistic.how][name] = statistic.value.cpu()
        return tensors

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Take the statistics of an earlier ``state_dict`` into these."""
        for how in DTYPES:
            for name, value in state[how].items():
                self.take(name, value.to(device), how)
