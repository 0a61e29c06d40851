"""Ranks that are threads of one process, along the axes of a mesh: for layouts that no test has processes for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lpq.calibration.reducing import Place


class Meeting:
    """Where threads exchange what they bring."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def all(self, rank: int, mine: Any) -> list[Any]:
        self.brought[rank] = mine
        self.barrier.wait(20)
        found = [*self.brought]
        self.barrier.wait(20)
        return found


class VirtualAxis:
    """An axis for one thread."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self._meeting = rank, meeting

    def exchange(self, told: Any) -> list[Any]:
        return self._meeting.all(self.rank, told)

    def combine(self, packed: Tensor, how: str) -> Tensor:
        stacked = torch.stack(self._meeting.all(self.rank, packed))
        return stacked.amax(0) if how == "max" else stacked.sum(0)


def on_mesh(mesh: Mapping[str, int], function: Callable[[dict[str, Any]], Any]) -> dict[Place, Any]:
    """``function(axes)`` on every rank of a mesh of these sizes; what each returned or raised."""
    meetings: dict[tuple[str, Place], Meeting] = {}
    found: dict[Place, Any] = {}

    def run(place: Place, axes: dict[str, Any]) -> None:
        try:
            found[place] = function(axes)
        except Exception as error:
            found[place] = error

    threads = []
    for place in itertools.product(*map(range, mesh.values())):
        axes = {}
        for i, (name, size) in enumerate(mesh.items()):
            others = (name, place[:i] + place[i + 1 :])
            axes[name] = VirtualAxis(place[i], meetings.setdefault(others, Meeting(size)))
        threads.append(threading.Thread(target=run, args=(place, axes)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
