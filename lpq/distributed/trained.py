"""A check that optimizers train each weight of a model, and each once.

Some libraries exchange the parameters of an optimizer for those of a sharded model. Where that goes wrong, an optimizer
has one weight several times, and other weights are in none, and the loss may fall nevertheless. Several optimizers may
share a model out, have parameters of other models, too, and leave out weights that are frozen or get no gradient.

The decision depends on facts that are equal on all ranks: the optimizers and their parameters.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lpq.distributed.alive import alive
from lpq.registry.showing import listed

Named = Mapping[str, Tensor]
"""Weights that belong to one model, by their names in it."""


class Trained:
    """The optimizers that have stepped, and the weights that none of them has."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        """The ids of the parameters that each optimizer had when it was taken in."""
        self._left: weakref.WeakKeyDictionary[Optimizer, list[_Weight]] = weakref.WeakKeyDictionary()
        """For each optimizer, the weights of its models that none of these optimizers has; mostly there are none."""

    def is_new(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        """Whether an optimizer has not stepped yet, or has other parameters since."""
        return self._seen.get(optimizer) != [*map(id, params)]

    def take_in(self, optimizer: Optimizer, params: Sequence[Tensor], models: Iterable[Named]) -> None:
        """Add a new optimizer; raise if it has one of its parameters several times."""
        ids = [*map(id, params)]
        has = set(ids)
        mine = [weights for weights in models if any(id(weight) in has for weight in weights.values())]
        if mine and len(has) < len(ids):
            raise RuntimeError(_twice(optimizer, params, mine))
        self._seen[optimizer] = ids
        self._left[optimizer] = [
            _Weight(name, weakref.ref(weight)) for weights in mine for name, weight in weights.items()
        ]
        known = {i for seen in self._seen.values() for i in seen}
        for left in self._left.values():
            left[:] = [weight for weight in left if weight.id not in known]

    def check(self, optimizer: Optimizer) -> None:
        """Raise if another weight of this optimizer's models got a gradient, and no optimizer has it."""
        left = self._left.get(optimizer)
        if not left or not any(weight.got_a_gradient for weight in left):
            return
        others = alive(Optimizer)
        if not any(other is optimizer for other in others):  # gc.freeze() hides it, and maybe others
            left.clear()
            return
        groups = (group for other in others for group in getattr(other, "param_groups", ()))
        owned = {id(param) for group in groups for param in group["params"]}
        left[:] = [weight for weight in left if weight.id not in owned]
        lost = [weight.name for weight in left if weight.got_a_gradient]
        if lost:
            raise RuntimeError(
                f"no optimizer has {listed(lost, 3)}, though this {type(optimizer).__name__} has other weights of the "
                "model, and so these would never be trained: give them to an optimizer that is made before the first "
                "step, or freeze them by requires_grad_(False)"
            )


class _Weight(NamedTuple):
    """A weight, for as long as it lives."""

    name: str
    ref: weakref.ref[Tensor]

    @property
    def id(self) -> int:
        return id(self.ref())

    @property
    def got_a_gradient(self) -> bool:
        weight = self.ref()
        return weight is not None and weight.requires_grad and weight.grad is not None


def _twice(optimizer: Optimizer, params: Sequence[Tensor], models: Sequence[Named]) -> str:
    names = {id(weight): name for weights in models for name, weight in weights.items()}
    times = Counter(map(id, params))
    several = next(param for param in params if times[id(param)] > 1)
    name = names.get(id(several), f"a parameter of {[*several.shape]}")
    none = [name for weight, name in names.items() if weight not in times]
    return (
        f"this {type(optimizer).__name__} has {name} {times[id(several)]} times, so that a step would write to it as "
        f"often{f', and it has no {listed(none, 3)}' if none else ''}: make it of model.parameters() once the model is "
        "sharded. If a library exchanged its parameters, have that shard the model as well"
    )
