"""Whether the states of several ranks may be combined by MAX: whether a state rises with the statistics that it
remembers.

Ranks that share a model remember statistics of their own inputs, and take the largest of each state after a step. That
is what one process would remember of all inputs, if no part of a state falls as a statistic rises. A format declares
nothing of that, so it is tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from lpq.formats.layout import Stat, StateBuffer

LOWER, HIGHER = 0.25, 4.0
SIZES = 1.0, 2.0**-60
"""Both are tried: a state that overflows, and is replaced then, falls at the first alone."""
STEPS = 0, 2
"""The numbers of steps that a state has seen before."""
Values = Mapping[str, Tensor]
Remember = Callable[[Values, Values], None]


def falling(state: Sequence[StateBuffer], stats: Sequence[Stat], remember: Remember) -> str | None:
    """The name of a part of the state that falls as a statistic rises; None if there is none, or if ``remember`` fails
    for what is tried, which the first step of a layer tells."""
    with torch.device("cpu"), torch.no_grad():
        try:
            for raised, steps in product(stats, STEPS):
                fallen = [_fallen(state, stats, remember, raised.name, steps, size) for size in SIZES]
                if always := [name for name in fallen[0] if name in fallen[1]]:
                    return always[0]
        except Exception:  # a format's own
            return None
    return None


def _fallen(
    state: Sequence[StateBuffer], stats: Sequence[Stat], remember: Remember, raised: str, steps: int, size: float
) -> list[str]:
    """The parts of the state that are lower after a higher statistic."""
    states = []
    for value in (LOWER, HIGHER):
        memory = {s.name: torch.zeros(s.shape, dtype=torch.float32) for s in state}
        ones = {stat.name: torch.ones(stat.grid(1, 1), dtype=stat.dtype) for stat in stats}
        for _ in range(steps):
            remember(memory, ones)
        remember(memory, {**ones, raised: ones[raised] * (value * size)})
        states.append(memory)
    lower, higher = states
    return [name for name in lower if bool((higher[name] < lower[name]).any())]
