"""Writing to quantized tensors: the values are encoded again, many tensors with one reduction of their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lpq.core import operations
from lpq.core.quantize import check_input, encode_operands
from lpq.core.reduce import check_shard, max_in_place, same_ranks, spans
from lpq.core.storage import Storage
from lpq.core.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Rewrite:
    """One tensor to write to: its value, and the operands and statistics that it takes."""

    def __init__(self, target: QuantizedTensor, value: Tensor) -> None:
        check_input(value)
        self.target, self.value = target, value
        self.row = target.quantizer.side("row") if target.row is not None else None
        self.col = target.quantizer.side("col") if target.col is not None else None
        self.declared = operations.declared(self.row, self.col)
        self.stats: list[Tensor] = []

    @property
    def in_turn(self) -> bool:
        """Whether the column operand is encoded too, from what the row operand decodes to."""
        return self.col is not None and self.target.quantizer.col_source == "row"

    def shared_with(self) -> ProcessGroup | None:
        """The group over which statistics have to be reduced before this one can be encoded; None if there is none."""
        group = self.target.amax_group
        if group is None or not any(spans(d) for d in self.declared):
            return None
        if group == "unattached":
            raise RuntimeError(
                f"this {list(self.target.shape)} tensor, stored as {self.target.quantizer}, is a shard, and the group "
                "that holds the others is not known yet: call lpq.distributed.attach(parameter) before writing to it"
            )
        return group if group.size() > 1 else None

    def measure(self) -> list[Tensor]:
        """Measure the value; those statistics that have yet to be reduced, in place, over the ranks of the group."""
        if self.in_turn:
            return []  # those of the column operand are of what the reduced row operand decodes to
        check_shard(self.declared, self.value.shape[0])
        self.stats = operations.measure(self.value, self.row, self.col)
        return [s for s, d in zip(self.stats, self.declared, strict=True) if spans(d)]

    def encode(self) -> None:
        if self.in_turn:
            group, quantizer = self.shared_with(), self.target.quantizer
            side = quantizer.side("row")
            as_is = any(b.dtype is None for b in side.layout)  # the row operand is kept in this dtype
            value = self.value.to(self.target.dtype) if as_is else self.value
            both = encode_operands(quantizer, value, row=self.row is not None, group=group)
            row, col = both.row, both.col
        else:
            row, col, _ = operations.quantize(self.value, self.stats, self.row, self.col)
        overwrite(self.target, row, col)


@torch.no_grad()
def write(targets: Sequence[QuantizedTensor], values: Sequence[Tensor]) -> None:
    """Encode each value, a matrix, into the operands that its target has; one collective for each group of ranks and
    each device."""
    rewrites = [_Rewrite(target, value) for target, value in zip(targets, values, strict=True)]
    by_ranks: dict[tuple[object, ...], tuple[ProcessGroup, list[_Rewrite]]] = {}
    for one in rewrites:
        group = one.shared_with()
        if group is not None:
            by_ranks.setdefault((*same_ranks(group), one.value.device), (group, []))[1].append(one)
    for group, together in by_ranks.values():
        max_in_place([s for one in together for s in one.measure()], group)
    for one in rewrites:
        one.encode()


def overwrite(target: QuantizedTensor, row: Storage | None, col: Storage | None) -> None:
    """Put the buffers of these operands in place of those that the target has."""
    for old, new in ((target.row, row), (target.col, col)):
        if old is not None and new is not None:
            for buffer, written in zip(old.tensors(), new.tensors(), strict=True):
                buffer.copy_(written)
