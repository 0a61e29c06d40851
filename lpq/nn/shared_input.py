"""Inputs that were encoded, for layers that get the same tensor; under tensor parallelism each is gathered once in each
direction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpq.torch_private.tensors import version_of

Buffers = tuple[Any, Sequence[Tensor]]


class KnownInput(weakref.ref[Tensor]):
    """A tensor that was encoded."""

    __slots__ = ("as_it_was", "by", "value")

    as_it_was: tuple[object, ...]
    by: set[int]
    """The layers that have had it, each by its ``id``. One that asks again is in another pass, before which the tensor
    may have been written to by other means than autograd counts."""
    value: Any
    """The operands."""


class EncodedInputs(dict[object, KnownInput]):
    """The inputs that the layers of a model encoded last, the oldest first, each under a key of its own. When a
    tensor dies, ``pop`` with the key drops its input, if no other thread has: no Python code runs there, in which an
    interrupt would be lost."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a model's layers share encoded inputs among themselves, and begin with none."""
        return type(self), ()


class SharedColumn:
    """The column operand that siblings have in common, gathered once: it stays as long as a sibling needs it."""

    def __init__(self, inputs: LastInput) -> None:
        self._inputs = inputs
        self._users = 0
        self._col: Sequence[Tensor] | None = None

    def used(self) -> None:
        """Note that one more layer needs it in backward."""
        self._users += 1

    def begin(self, begin: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> Any:
        """Begin to gather it, unless a sibling has."""
        return begin(tensors) if self._col is None else None

    def finish(self, later: Callable[[Any], Sequence[Tensor]], begun: Any) -> Sequence[Tensor]:
        """The operand, for one of the layers."""
        col = self._col if begun is None else later(begun)
        assert col is not None
        self._users -= 1
        self._col = col if self._users > 0 else None
        return col

    def clear(self) -> None:
        """Drop the input, as a gradient came."""
        self._inputs.clear()


class EncodedInput:
    """An input that layers have in common."""

    def __init__(self, tensor: Tensor, column: SharedColumn) -> None:
        self.tensor = tensor
        """The tensor through which the gradient of the input goes back: it sums the gradients of all layers over the
        ranks, and has the global shape where the input is gathered."""
        self.operands: Buffers | None = None
        """The row operand, and what backward needs for the column operand."""
        self.column = column


class LastInput(EncodedInputs):
    """The input that layers of a model encoded last, for layers that get the same tensor next. Only one is kept, so
    that all ranks find it or none does. The next input replaces it, and the first gradient frees it.
    """

    def find(self, x: Tensor, how: tuple[object, ...], layer: int) -> EncodedInput | None:
        """Return the encoded input that was made of this very tensor in this way, if the tensor has not changed
        since."""
        for entry in [*self.values()]:
            if entry() is x and entry.as_it_was == _as_it_is(x, how) and layer not in entry.by:
                entry.by.add(layer)
                value: EncodedInput = entry.value
                return value
        return None

    def keep(self, x: Tensor, how: tuple[object, ...], value: EncodedInput, layer: int) -> None:
        """Keep an encoded input until its tensor dies, or another one is kept."""
        key = object()
        entry = KnownInput(x, partial(self.pop, key))
        entry.as_it_was, entry.value, entry.by = _as_it_is(x, how), value, {layer}
        self.clear()
        self[key] = entry


def _as_it_is(x: Tensor, how: tuple[object, ...]) -> tuple[object, ...]:
    return (version_of(x), x.data_ptr(), torch.is_grad_enabled(), *how)
