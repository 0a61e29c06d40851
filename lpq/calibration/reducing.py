"""Reducing statistics over ranks: names are compared first, then one reduction for each way of combining and each axis.

Ranks lie along **axes**, as a mesh of devices has them. A statistic names the axes along which ranks have parts
of it; along the others each rank has another one, as for experts of its own. A statistic of a logical
weight is found by its name, so that no layout pairs the wrong ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lpq.calibration.errors import CalibrationError
from lpq.calibration.statistics import DTYPES, EVERYWHERE, How, Statistic, Statistics
from lpq.distributed import agree
from lpq.operations.reduce_statistics import reduce_max
from lpq.registry.showing import listed

Place = tuple[int, ...]
"""The ranks of a process along all axes."""


class Axis(Protocol):
    """The ranks that differ from this one in one coordinate."""

    @property
    def rank(self) -> int:
        """The place of this rank among them."""

    def exchange(self, facts: Any) -> list[Any]:
        """Exchange objects with them; return all, in the order of the ranks."""

    def combine(self, packed: Tensor, how: How) -> Tensor:
        """The largest or the sum of a vector over them."""


Axes = Mapping[str, Axis]


class Ranks:
    """The ranks of a process group as an axis."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group: Any = group or dist.group.WORLD

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def exchange(self, facts: Any) -> list[Any]:
        return [*agree.exchange(facts, [self._group]).values()]

    def combine(self, packed: Tensor, how: How) -> Tensor:
        if how == "max":
            return reduce_max([packed], self._group)[0]
        packed = packed.clone()
        dist.all_reduce(packed, op=dist.ReduceOp.SUM, group=self._group)
        return packed


class Together(agree.Ranks):
    """The ranks that calibrate one model; an error on any of them is a ``CalibrationError`` on all."""

    def as_error(self, raised: BaseException) -> CalibrationError:
        return raised if isinstance(raised, CalibrationError) else CalibrationError(agree.message(raised))

    def axes(self) -> dict[str, Axis]:
        """All of them as one axis; none where there is but one process."""
        return {"ranks": Ranks(self.group)} if self.many else {}


def everywhere(facts: Any, axes: Axes) -> dict[Place, Any]:
    """Exchange objects between all ranks; return them by each rank's place along the axes, in the order of these."""
    known: dict[Place, Any] = {tuple(axis.rank for axis in axes.values()): facts}
    for axis in axes.values():
        known = {place: fact for one in axis.exchange(known) for place, fact in one.items()}
    return dict(sorted(known.items()))


def reduce(statistics: Statistics, axes: Axes) -> Statistics:
    """The statistics of all ranks together. Where ranks do not have the same ones, all raise, with the difference."""
    by_axes: dict[tuple[str, ...], dict[str, Statistic]] = {}
    for name, statistic in statistics.items():
        over = tuple(axes) if statistic.over == EVERYWHERE else statistic.over
        if unknown := [axis for axis in over if axis not in axes]:
            raise CalibrationError(f"{name} is to be reduced over {unknown[0]!r}; the axes are {', '.join(axes)}")
        by_axes.setdefault(over, {})[name] = statistic
    _check_names(by_axes, axes)
    reduced = Statistics()
    for over, same in sorted(by_axes.items()):
        for how in DTYPES:
            chosen = {name: s.value for name, s in same.items() if s.how == how}
            for name, value in _reduced(chosen, [axes[axis] for axis in over], how).items():
                reduced.take(name, value, how, same[name].over)
    return reduced


def _reduced(values: Mapping[str, Tensor], axes: Sequence[Axis], how: How) -> dict[str, Tensor]:
    if not values:
        return {}
    packed = torch.cat([value.reshape(-1) for value in values.values()])
    for axis in axes:
        packed = axis.combine(packed, how)
    parts = torch.split(packed, [value.numel() for value in values.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(values.items(), parts, strict=True)}


def _check_names(by_axes: Mapping[tuple[str, ...], Mapping[str, Statistic]], axes: Axes) -> None:
    """Raise on all ranks alike unless those that reduce together have the same statistics.

    Hashes travel first, and names only where these differ.
    """
    if not axes:
        return
    facts = {over: [f"{name} {s.how} {[*s.value.shape]}" for name, s in same.items()] for over, same in by_axes.items()}
    number = {over: hashlib.sha256("\n".join(names).encode()).hexdigest() for over, names in facts.items()}
    if not _differing(everywhere(number, axes), axes):
        return
    known = everywhere(facts, axes)
    first, second, over = _differing(known, axes)[0]
    mine, theirs = known[first].get(over, []), known[second].get(over, [])
    lacking = [[n.split()[0] for n in a if n not in b] for a, b in ((mine, theirs), (theirs, mine))]
    words = [
        f"rank {_shown(has, axes)} has {listed(names)}, which rank {_shown(other, axes)} lacks"
        for (has, other), names in zip(((first, second), (second, first)), lacking, strict=True)
        if names
    ]
    raise CalibrationError(
        f"the ranks have other statistics: {'; '.join(words)}. Build and convert the model alike on all of them, and "
        "have each forward pass go through the same layers"
    )


def _differing(known: Mapping[Place, Any], axes: Axes) -> list[tuple[Place, Place, tuple[str, ...]]]:
    """Pairs of ranks that reduce something together and differ in it, with the axes of that."""
    found = []
    names = tuple(axes)
    for over in sorted({over for facts in known.values() for over in facts}):
        first: dict[Place, Place] = {}
        for place, facts in known.items():
            apart = tuple(rank for name, rank in zip(names, place, strict=True) if name not in over)
            other = first.setdefault(apart, place)
            if known[other].get(over) != facts.get(over):
                found.append((other, place, over))
    return found


def _shown(place: Place, axes: Axes) -> str:
    return str(place[0]) if len(place) == 1 else ", ".join(f"{n} {r}" for n, r in zip(axes, place, strict=True))
