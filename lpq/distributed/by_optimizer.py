"""Values of optimizers, each for as long as its optimizer lives."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch.optim import Optimizer

V = TypeVar("V")


class ByOptimizer(Generic[V]):
    """Values by optimizer. As in a ``WeakKeyDictionary``, no optimizer is kept alive. But no function is called when
    one dies, as Python would drop an interrupt (Ctrl-C) that came inside: the dead are removed when the next one is
    added."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Optimizer], V]] = {}

    def get(self, optimizer: Optimizer) -> V | None:
        """The value of an optimizer, if it has one."""
        ref, value = self._known.get(id(optimizer), (None, None))
        return value if ref is not None and ref() is optimizer else None

    def put(self, optimizer: Optimizer, value: V) -> None:
        """Give an optimizer a value."""
        for number, (ref, _) in [*self._known.items()]:
            if ref() is None:
                self._known.pop(number, None)
        self._known[id(optimizer)] = weakref.ref(optimizer), value
