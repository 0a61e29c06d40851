"""Observers: told of each tensor that a layer encodes, beside the pass that encodes it.

The pass goes on as without them. An observer's requests are served apart from it: statistics are measured once more,
and operands are made by an encoder of their own, from the same statistics, state and seed, so they equal the operands
of the pass to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn

from lpq.formats.format import Quantizer, Storage
from lpq.formats.sections import bounds
from lpq.operations.cut import Cut
from lpq.operations.decoding import decode
from lpq.operations.encoder import EncoderSpec, through_operators
from lpq.operations.inputs import as_matrix
from lpq.operations.measuring import measure
from lpq.operations.offsets import read
from lpq.operations.part_encoders import SpanningStats, along, bind_exchange, bind_part
from lpq.operations.states import State, recall
from lpq.tensor.quantized_tensor import QuantizedTensor

Name = Literal["x", "w", "dy", "y"]
"""The input, the weight, the gradient of the output, and the output, which is not encoded. Under tensor parallelism no
output is told of."""


class Observer(Protocol):
    """Is told of each tensor of each pass of the layers that it observes; see ``lpq.observe.observing``."""

    def observe(self, seen: Observed) -> None:
        """Observe a tensor. Autograd is off. The pass raises the errors that are raised here."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Observed:
    """One tensor of one pass of a layer. It is used before ``observe`` returns: later the tensor may be written to."""

    layer: nn.Module
    name: Name
    given: Tensor
    """The tensor as the pass has it, or this rank's part of it: a ``QuantizedTensor`` where it came encoded."""
    quantizer: Quantizer
    """The recipe's quantizer for the tensor; for an output, the quantizer of high precision."""
    state: State | None = None
    """The state of its quantizer, before this pass moves it."""
    seed: Tensor | None = None
    stack: str = ""
    """The name of the stack of weights, in a module that has several, as Hugging Face's experts do."""
    group: int | None = None
    """The number of its group among all groups of the layer, or of its expert."""
    offs: Tensor | None = None
    """Where the groups of its rows end, in a layer that multiplies groups of rows."""
    first: int = 0
    """The number of the first group that this rank has."""
    of_pass: object = None
    """An object that is the same for all tensors of a pass, backward included."""
    again: bool = False
    """Whether activation checkpointing runs a forward that was observed already."""
    row: bool = True
    col: bool = True
    """Whether it has these operands. A rank's part may lack operands that the pass does not need."""
    cut: Cut | None = None
    """How it is divided over ranks; None: it is whole."""
    among: str = ""
    """The name of the process group of these ranks."""

    @property
    def value(self) -> Tensor:
        """The tensor in high precision, decoded where it came encoded."""
        return self.given.dequantize() if isinstance(self.given, QuantizedTensor) else self.given

    @property
    def is_part(self) -> bool:
        """Whether the tensor is divided over ranks, so that this is a part of it."""
        return self.cut is not None

    @property
    def place(self) -> tuple[int, int]:
        """The number of its first row and of its first column in the whole tensor, by which random bits are drawn."""
        if self.cut is None:
            return 0, 0
        return (self.cut.place(0), 0) if self.cut.dim == 0 else (0, self.cut.place(0))

    @property
    def together(self) -> int:
        """How many of its rows, from the first on, lie beside each other in the whole tensor."""
        return self.cut.size if self.cut is not None and self.cut.dim == 0 else math.prod(self.given.shape[:-1])

    def under(self, quantizer: Quantizer) -> Self:
        """Return the same tensor as another quantizer, which remembers nothing, would encode it."""
        row, col = operands_of_part(self.cut, quantizer)
        return replace(self, quantizer=quantizer, state=None, seed=None, row=row, col=col)

    def groups(self) -> Iterator[Observed]:
        """Yield each group's tensor, if it has rows; of a layer without groups, the tensor itself.

        For groups of rows the host waits until it knows where they end.
        """
        value = self.value
        if self.offs is not None:
            each = [value[start:stop] for start, stop in bounds(read(self.offs, len(value)))]
        elif value.dim() == 3 and self.name == "w":
            each = [*value]
        else:
            yield self
            return
        for i, own in enumerate(each):
            if len(own):
                state = None if self.state is None else {key: values[i] for key, values in self.state.items()}
                seed = None if self.seed is None else self.seed[i]
                yield replace(self, given=own, state=state, seed=seed, group=self.first + i, offs=None)

    def statistics(self) -> dict[str, Tensor]:
        """Measure the statistics with which the tensor is encoded; where it is divided over ranks, the statistics of
        the whole. They have the names in the format, with the prefix ``row_`` or ``col_`` where the operands have
        different statistics. The statistics of a column operand that is made of the row operand are left out. All ranks
        that share the tensor must call this.
        """
        self._refuse_groups("statistics")
        derived = self.quantizer.col_source == "row"
        branches = dict(self.quantizer.state_branches())
        if derived or not self.col:
            branches.pop("col_", None)
        if not (self.row or derived):
            branches.pop("row_", None)
        row, col = branches.get("", branches.get("row_")), branches.get("col_")
        names = [prefix + stat.name for prefix, branch in branches.items() for stat in branch.stats]
        return dict(zip(names, self._measured(row, col), strict=True))

    def known(self) -> list[Tensor]:
        """Return the statistics with which the tensor is encoded, as ``statistics`` measures them or as its state has
        them, in the order in which its operands declare them. All ranks that share the tensor call this."""
        self._refuse_groups("statistics")
        derived, quantizer = self.quantizer.col_source == "row", self.quantizer
        row = quantizer.side("row") if self.row or derived else None
        col = quantizer.side("col") if self.col and not derived else None
        measured = self._measured(row, col)
        if self.state is None:
            return measured
        recalled = recall(quantizer, row, col, self.state)
        return [one if own is None else own for one, own in zip(measured, recalled, strict=True)]

    def decoded(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the fp32 matrices that the row and the column operand stand for, both laid out as the tensor is, with
        all leading dimensions as rows.

        None for an operand that it does not have. All ranks that share the tensor call this.
        """
        self._refuse_groups("operands")
        row, col = self.given.stored if isinstance(self.given, QuantizedTensor) else self._encoded()
        of_row, of_col = (None if operand is None else decode(operand, torch.float32) for operand in (row, col))
        return of_row, None if of_col is None else of_col.t()

    def _refuse_groups(self, what: str) -> None:
        if self.offs is not None or (self.given.dim() == 3 and self.name == "w"):
            raise ValueError(f"{self.name} of a layer with groups has {what} for each of them: use groups()")

    def _measured(self, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
        if self.cut is None:
            return measure(as_matrix(self.value), row, col)
        spanning = SpanningStats(partial(measure, row=row, col=col), along(self.cut, row, col), row, col)
        (stats,), _ = bind_exchange([spanning], self.among)([self.value], None)
        return stats

    def _encoded(self) -> tuple[Storage | None, Storage | None]:
        x, remembers = as_matrix(self.given), self.state is not None
        spec = EncoderSpec(self.quantizer, (x.shape[0], x.shape[1]), x.dtype, x.device, self.row, self.col, remembers)
        encoder = bind_part(through_operators, spec, self.cut, self.among).alone(self.among).encoder
        of_row, of_col, _ = encoder.encode(x, self.state or (), self.seed)
        return encoder.storages(of_row, of_col)


def operands_of_part(cut: Cut | None, quantizer: Quantizer) -> tuple[bool, bool]:
    """Whether a part has a row operand, and a column operand: an operand that can be cut so."""
    row, col = (cut is None or cut.why_not(quantizer, one, not one) is None for one in (True, False))
    return row, col
