"""Layers that are given the same tensor, such as q, k and v, or gate and up: it is encoded once for all of them.

The operands are kept beside a weak reference to the tensor, by all layers of one ``lpq.convert`` together. A layer
takes the operands for that very object if it has not changed: autograd has counted no write to it, and its memory has
the same address. So a clone, another view or another version is encoded anew. So is a tensor made under
``torch.inference_mode``, for which PyTorch counts no writes. A write through ``.data``, by another process, through
numpy, or by a kernel that bypasses autograd, goes unnoticed: as with any tensor that autograd keeps for backward, it is
not allowed between two siblings, unless ``torch.autograd.graph.increment_version`` counts it. Between two passes it is:
a layer that gets the tensor again encodes it again.

Layers with static statistics share inputs where the values of these are equal. They are read off the buffers when a
layer runs for the first time, and again when autograd has counted a write to them, since a GPU would have to be waited
for.

Autograd keeps the column operand for backward, once for all siblings. The row operand is of no use after the last
sibling, but no layer can find out that it is the last, and the tensor may live on: autograd keeps it where an adapter
or a router, which are not encoded, multiplies it too. So operands are freed when the tensor dies, when ``MOST`` others
have been encoded, or when a gradient arrives at any of the layers. In evaluation as in training a model thus holds at
most ``MOST`` encoded inputs besides the inputs that autograd keeps, and none whose tensor is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lpq.nn.shared_input import EncodedInputs, KnownInput, LastInput
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
        self._as_they_were: tuple[object, ...] = ()
        self._values: tuple[float, ...] = ()

    def read(self, state: State) -> tuple[object, ...]:
        """The values; nothing waits for the device if they are unchanged since the last call. The values of
        buffers that were made under inference mode equal no others, as torch counts no writes to them."""
        buffers = [local_part(buffer) for buffer in state.values()]
        if any(b.is_inference() for b in buffers):
            return (object(),)
        as_they_are = tuple((b.data_ptr(), version_of(b)) for b in buffers)
        if as_they_are != self._as_they_were:
            self._values = tuple(float(value) for buffer in buffers for value in buffer.flatten().tolist())
            self._as_they_were = as_they_are
        return self._values


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
        as_it_is = (version_of(x), x.data_ptr(), stream, *static)
        row, later = encoder.row, encoder.later is not None
        col = (encoder.col, encoder.derived, later)
        for entry in [*self.values()]:
            if layer in entry.by and entry() is x:  # another pass, and x may have changed uncounted
                for same in [key for key, other in [*self.items()] if other() is x]:
                    self.pop(same, None)
                break
        for entry in [*self.values()]:
            if entry() is x and entry.as_it_was == as_it_is:
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
            entry.as_it_was, entry.value, entry.by = as_it_is, (row, col, (of_row, of_col)), {layer}
            self[key] = entry
        if encoder.col is None:
            return of_row, (), ()
        return of_row, (x, *of_col) if later else of_col, ()
