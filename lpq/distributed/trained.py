"""A check that optimizers train each weight of a model exactly once.

Some libraries exchange the parameters of an optimizer for the parameters of a sharded model. Where that goes wrong, an
optimizer has one weight several times, and other weights are in none, and the loss may fall nevertheless. Several
optimizers may divide a model among them, have parameters of other models, too, and leave out weights that are frozen or
get no gradient.

The decision depends on facts that are equal on all ranks: the optimizers that have stepped, and their parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from lpq.distributed.by_optimizer import ByOptimizer
from lpq.registry.showing import listed
from lpq.registry.warning import warn

PATIENCE = 16
"""The number of steps of one optimizer after which another one should have stepped, too."""

Named = Mapping[str, Tensor]
"""Weights that belong to one model, by their names in it."""


class Trained:
    """The optimizers that have stepped weights of one model, and the weights that are in none of these optimizers."""

    def __init__(self) -> None:
        self._seen: ByOptimizer[_Seen] = ByOptimizer()
        self._left: dict[str, Tensor] = {}
        """The weights, by name, that are in none of these optimizers; mostly there are none. They are not weak
        references: ``module.to()`` could not exchange a parameter that has one."""

    def check(self, optimizer: Optimizer, params: Sequence[Tensor], weights: Callable[[], Named]) -> None:
        """Raise, before a step of an optimizer, if it has one of its parameters several times. Warn if a weight still
        gets gradients that no optimizer has stepped: one that will may step seldom."""
        seen = self._seen.get(optimizer)
        if seen is None or seen.ids != [*map(id, params)]:
            named = weights()
            seen = _Seen([*map(id, params)])
            if len({*seen.ids}) < len(seen.ids):
                raise RuntimeError(_twice(optimizer, params, named))
            self._seen.put(optimizer, seen)
            known = {number for one in self._seen.values() for number in one.ids}
            self._left = {name: weight for name, weight in named.items() if id(weight) not in known}
        seen.steps += 1
        if seen.steps == PATIENCE and (
            lost := [name for name, weight in self._left.items() if _gets_a_gradient(weight)]
        ):
            warn(
                f"no optimizer that has made a step has {listed(lost, 3)}, though they get gradients, and this "
                f"{type(optimizer).__name__} has made {PATIENCE} steps with other weights of the model: if no other "
                "one will, they are never trained. Give them to an optimizer, or freeze them by requires_grad_(False)"
            )


@dataclass
class _Seen:
    """An optimizer as it stepped last: the ids of its parameters, and how often."""

    ids: list[int]
    steps: int = 0


def _gets_a_gradient(weight: Tensor) -> bool:
    return weight.requires_grad and weight.grad is not None


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
