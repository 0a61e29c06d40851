"""Layers that are given the same tensor, such as q, k and v, or gate and up: it is encoded once for all of them.

A layer takes the operands of a tensor that another layer of the same ``lpq.convert`` encoded, if it is that very object
and autograd has counted no write to it since. So a clone, another view, or a tensor made under
``torch.inference_mode``, which counts no writes, is encoded anew. A write that nothing counts, as through ``.data``, is
not allowed between two siblings. Layers with static statistics share inputs where the values of these are equal. They
are read off the buffers when a layer runs for the first time, and again when autograd has counted a write to them,
since a GPU would have to be waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpq.operations.binding import Encoded
from lpq.operations.encoder import Encoder, Stats
from lpq.operations.states import State
from lpq.torch_private import cuda
from lpq.torch_private.tensors import local_part, version_of

MOST = 2
"""Inputs that are kept. One is too few where the siblings have others between them: low-rank projections, adapters."""


class StaticValues:
    """The values of the buffers that a layer uses in place of measured statistics when it encodes its input."""

    def __init__(self) -> None:
        self._stamps: tuple[object, ...] = ()
        self._values: tuple[float, ...] = ()

    def read(self, state: State) -> tuple[object, ...]:
        """The values; nothing waits for the device if they are unchanged since the last call. The values of
        buffers that were made under inference mode equal no others, as torch counts no writes to them."""
        buffers = [local_part(buffer) for buffer in state.values()]
        if any(b.is_inference() for b in buffers):
            return (object(),)
        stamps = tuple((b.data_ptr(), version_of(b)) for b in buffers)
        if stamps != self._stamps:
            self._values = tuple(float(value) for buffer in buffers for value in buffer.flatten().tolist())
            self._stamps = stamps
        return self._values


class KnownInput(weakref.ref[Tensor]):
    """A tensor that was encoded."""

    __slots__ = ("by", "stamp", "value")

    stamp: tuple[object, ...]
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
    """The column operand that siblings have in common, gathered or made once: it stays while a sibling needs it."""

    def __init__(self, encoder: Encoder | None = None) -> None:
        """``encoder``: the producer's, which makes it in backward; None: the layers have encoders that gather it."""
        self.encoder, self.users = encoder, 0
        """``users``: the layers that need it in backward, and have not had it."""
        self.operand: Sequence[Tensor] | None = None

    def begin(self, begin: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> Any:
        """Begin to gather it, unless a sibling has."""
        return begin(tensors) if self.operand is None else None

    def finish(self, later: Callable[[Any], Sequence[Tensor]], begun: Any) -> Sequence[Tensor]:
        """The operand, for one of the layers."""
        col = self.operand if begun is None else later(begun)
        assert col is not None
        self.users -= 1
        self.operand = col if self.users > 0 else None
        return col


class EncodedInput:
    """An input that layers have in common."""

    def __init__(self, tensor: Tensor, column: SharedColumn) -> None:
        self.tensor = tensor
        """The tensor through which the gradient of the input goes back: it sums the gradients of all layers over the
        ranks, and has the global shape where the input is gathered."""
        self.operands: tuple[Any, Sequence[Tensor]] | None = None
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
            if entry() is x and entry.stamp == _input_stamp(x, how) and layer not in entry.by:
                entry.by.add(layer)
                value: EncodedInput = entry.value
                return value
        return None

    def keep(self, x: Tensor, how: tuple[object, ...], value: EncodedInput, layer: int) -> None:
        """Keep an encoded input until its tensor dies, or another one is kept."""
        key = object()
        entry = KnownInput(x, partial(self.pop, key))
        entry.stamp, entry.value, entry.by = _input_stamp(x, how), value, {layer}
        self.clear()
        self[key] = entry


def _input_stamp(x: Tensor, how: tuple[object, ...]) -> tuple[object, ...]:
    return (version_of(x), x.data_ptr(), torch.is_grad_enabled(), *how)


class SharedInputs(EncodedInputs):
    """The inputs that the layers of a model encoded last: of each the row operand; the column operand, whether it is
    made of the row operand, and whether backward makes it; and the buffers of both operands. Where backward makes the
    column operand, it uses the tensor and the second list."""

    whole: LastInput | None = None
    """The input that layers under tensor parallelism keep in place of the list."""

    def encode(self, encoder: Encoder, x: Tensor, state: Stats, static: Sequence[object], layer: int) -> Encoded:
        """Encode ``x``, without a seed, or take the operands that another layer made of it.

        ``static``: the values of ``state``, which no step moves; operands serve layers with the same values. ``layer``:
        its ``id``.
        """
        stream = 0
        if x.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return encoder.encode(x, state, None)  # a replayed graph must encode the new values
            stream = cuda.current_stream(x.get_device())
        if x.is_inference():
            return encoder.encode(x, state, None)
        stamp = (version_of(x), x.data_ptr(), stream, *static)
        row, later = encoder.row, encoder.later is not None
        col = (encoder.col, encoder.derived, later)
        for entry in [*self.values()]:
            if layer in entry.by and entry() is x:  # another pass, and x may have changed uncounted
                for same in [key for key, other in [*self.items()] if other() is x]:
                    self.pop(same, None)
                break
        for entry in [*self.values()]:
            if entry() is x and entry.stamp == stamp:
                known_row, known_col, (of_row, of_col) = entry.value
                if known_row == row and (encoder.col is None or known_col == col):
                    entry.by.add(layer)
                    break
        else:
            assert row is not None
            # A view of x itself would keep x alive.
            plain = row.quantizer.plain or (encoder.col is not None and encoder.col.quantizer.plain)
            of_row, of_col, _ = encoder.encode(x.detach() if plain else x, state, None)
            of_col = of_col[1:] if later else of_col if encoder.col is not None else ()
            for oldest in [*self][: 1 - MOST]:
                self.pop(oldest, None)
            key = object()
            entry = KnownInput(x, partial(self.pop, key))
            entry.stamp, entry.value, entry.by = stamp, (row, col, (of_row, of_col)), {layer}
            self[key] = entry
        if encoder.col is None:
            return of_row, (), ()
        return of_row, (x, *of_col) if later else of_col, ()
