"""The clocks: GPU time of steps that take turns, and host time of steps that leave the GPU idle.

Contenders take turns in an order that changes from round to round, so that a clock that drifts, and the heat that one
leaves to the next, hit all alike. The median over the rounds is reported.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

Step = Callable[[], object]
LEAD = 2
"""Steps queued before the clock starts, so that a step is timed as in training, where the host runs ahead if it can."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one step."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        return cls(statistics.median(samples), min(samples), max(samples))

    def record(self, unit: str) -> dict[str, float]:
        """In milliseconds (``ms``) or microseconds (``us``)."""
        scale = {"ms": 1e3, "us": 1e6}[unit]
        return {
            unit: self.median * scale,
            f"fastest_{unit}": self.fastest * scale,
            f"slowest_{unit}": self.slowest * scale,
        }


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 15
    sample: float = 0.02
    """Seconds that one sample on the GPU should last."""
    steps: int = 60
    """Steps in a sample: on the host exactly this number, on the GPU at most."""


QUICK = Effort(rounds=5, sample=0.015, steps=50)
ON_CPU = Effort(rounds=3, steps=1)
"""Enough where a layer takes far longer than the clock's least span."""


def event() -> torch.cuda.Event:
    """A mark on the GPU's time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Seconds from one mark to another."""
    return float(start.elapsed_time(end)) / 1e3


def on_gpu(steps: Mapping[str, Step], effort: Effort, count: int | None = None) -> dict[str, Timing]:
    """The time from one step to the next in a long queue, by CUDA events: of host and GPU the slower one.

    ``count``: the steps in a sample, which ranks that meet in a step must have in common; None: by how long they take.
    """
    counts = {name: count or _fitting(step, effort) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for name in _turns(steps, effort):
        step = steps[name]
        start, end = event(), event()
        for _ in range(LEAD):
            step()
        start.record()
        for _ in range(counts[name]):
            step()
        end.record()
        end.synchronize()
        samples[name].append(between(start, end) / counts[name])
    return {name: Timing.of(times) for name, times in samples.items()}


def on_host(steps: Mapping[str, Step], effort: Effort, synchronize: Step) -> dict[str, Timing]:
    """Wall time of a step of many in a row. Where the GPU has next to nothing to do, it is the host's."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for name in _turns(steps, effort):
        step = steps[name]
        for _ in range(LEAD):
            step()
        synchronize()
        start = time.perf_counter()
        for _ in range(effort.steps):
            step()
        synchronize()
        samples[name].append((time.perf_counter() - start) / effort.steps)
    return {name: Timing.of(times) for name, times in samples.items()}


def in_turn(steps: Mapping[str, Step], device: torch.device) -> dict[str, Timing]:
    """The time of each step on this device, in few rounds."""
    return on_gpu(steps, QUICK) if device.type == "cuda" else on_host(steps, ON_CPU, lambda: None)


def _turns(names: Mapping[str, Step], effort: Effort) -> Iterator[str]:
    order = random.Random(0)
    for _ in range(effort.rounds):
        yield from order.sample(list(names), len(names))


def _fitting(step: Step, effort: Effort) -> int:
    """The steps that fill a sample."""
    return max(2, min(effort.steps, round(effort.sample / _roughly(step))))


def _roughly(step: Step) -> float:
    """The seconds of a step, once it is warm."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 2
