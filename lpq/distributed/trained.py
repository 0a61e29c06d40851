"""A check that no optimizer has a weight of a model several times.

Some libraries exchange the parameters of an optimizer for the parameters of a sharded model. Where that goes wrong, an
optimizer has one weight several times, and other weights are in none, and the loss may fall nevertheless.

The decision depends on facts that are equal on all ranks: the optimizer and its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lpq.registry.showing import listed

Named = Mapping[str, Tensor]
"""Weights that belong to one model, by their names in it."""


def check_once(optimizer: Optimizer, params: Sequence[Tensor], weights: Callable[[], Named]) -> None:
    """Raise, before a step of an optimizer, if it has one of its parameters several times."""
    if len({*map(id, params)}) < len(params):
        raise RuntimeError(_twice(optimizer, params, weights()))


def _twice(optimizer: Optimizer, params: Sequence[Tensor], weights: Named) -> str:
    names = {id(weight): name for name, weight in weights.items()}
    times = Counter(map(id, params))
    several = next(param for param in params if times[id(param)] > 1)
    name = names.get(id(several), f"a parameter of {[*several.shape]}")
    none = [name for weight, name in names.items() if weight not in times]
    return (
        f"this {type(optimizer).__name__} has {name} {times[id(several)]} times, so that a step would write to it as "
        f"often{f', and it has no {listed(none, 3)}' if none else ''}: make it of model.parameters() once the model is "
        "sharded. If a library exchanged its parameters, have that shard the model as well"
    )
