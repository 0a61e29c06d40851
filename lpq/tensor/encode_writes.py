"""Writes to quantized tensors: values are encoded again, for many tensors with one reduction of their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq import operations
from lpq.formats.format import Quantizer, Storage
from lpq.formats.layout import bytes_of
from lpq.formats.sections import is_stack
from lpq.operations.cut import check_shard
from lpq.operations.decoding import decode
from lpq.operations.inputs import check_input
from lpq.operations.measuring import measure_again
from lpq.operations.reduce_statistics import Reductions, spans
from lpq.operations.sides import measures_again
from lpq.tensor.quantized_tensor import QuantizedTensor


class _Part:
    """One or both operands to encode of a value; and the ranks with which the statistics are shared."""

    def __init__(self, target: QuantizedTensor, value: Tensor, row: Quantizer | None, col: Quantizer | None) -> None:
        check_input(value)
        self.target, self.value, self.row, self.col = target, value, row, col
        self.declared = operations.declared(row, col)
        self.stats: list[Tensor] = []

    def shared_with(self) -> ProcessGroup | None:
        """The group over which statistics have to be reduced before this value can be encoded; None if there is
        none."""
        if self.target.amax_group is None or not any(spans(d) for d in self.declared) or is_stack(self.value.shape):
            return None
        if not self.target.attached():
            raise RuntimeError(
                f"{self.target.whose}this {list(self.target.shape)} tensor, stored as {self.target.quantizer}, is a "
                "shard, and the group that holds the others is not known yet: call "
                "lpq.distributed.attach(parameter) before writing to it"
            )
        group = cast("ProcessGroup", self.target.amax_group)
        return group if group.size() > 1 else None

    def encode(self) -> tuple[Storage | None, Storage | None]:
        row, col, _ = operations.quantize(self.value, self.stats, self.row, self.col)
        return row, col


@torch.no_grad()
def write(
    targets: Sequence[QuantizedTensor],
    values: Sequence[Tensor],
    beside: Reductions | None = None,
    changed: Sequence[Tensor] | None = None,
) -> None:
    """Encode each value, a matrix, into the operands that its target has, with one collective for each group of ranks
    and each device. There is a second one where column operands encode decoded row operands and have statistics of the
    whole, or where statistics are counts or of a second round.

    ``beside``: other values to reduce in the same collectives. ``changed``: for each target a number that is not 0 if
    it is to change on this rank. A target that changes on no rank keeps its codes: its decoded values, encoded again,
    may have other codes.
    """
    together: list[_Part] = []
    in_turn: list[_Part] = []
    for target, value in zip(targets, values, strict=True):
        sides = {direction: target.quantizer.side(direction) for direction, _ in target.operands}
        row, col = sides.get("row"), sides.get("col")
        if col is not None and target.quantizer.col_source == "row":
            of_row = target.quantizer.side("row")
            as_is = any(b.dtype is None for b in of_row.layout)  # it keeps the dtype of the tensor
            in_turn.append(_Part(target, value.to(target.dtype) if as_is else value, of_row, None))
        else:
            together.append(_Part(target, value, row, col))
    reductions = beside or Reductions()
    for target, flag in zip(targets, changed or (), strict=changed is not None):
        if target.amax_group is not None and target.attached():
            reductions.add([flag], cast("ProcessGroup", target.amax_group), [(target,)])
    _reduce([*together, *in_turn], reductions)
    encoded = [part.encode()[0] for part in in_turn]
    cols = [
        _Part(part.target, decode(row, torch.float32), None, part.target.quantizer.side("col"))
        for part, row in zip(in_turn, encoded, strict=True)
        if row is not None
    ]
    _reduce(cols, Reductions())
    only = {id(target): flag for target, flag in zip(targets, changed or ())}  # noqa: B905
    for part in together:  # from here on no rank waits for another
        overwrite(part.target, *part.encode(), only.get(id(part.target)))
    for part, first in zip(cols, encoded, strict=True):
        overwrite(part.target, first, part.encode()[1], only.get(id(part.target)))


def _reduce(parts: Sequence[_Part], reductions: Reductions) -> None:
    """Measure the parts whose statistics ranks share, and reduce these: of both rounds, if there are two."""
    pairs = [(part, group) for part in parts if (group := part.shared_with()) is not None]
    for part, group in pairs:
        check_shard(part.row, part.col, part.value.shape[0])
        part.stats = operations.measure(part.value, part.row, part.col)
        reductions.add_stats(part.declared, part.stats, group, 1, (part.target,))
    reductions.run()
    second = Reductions()
    for part, group in pairs:
        if measures_again(part.row, part.col):
            part.stats = measure_again(part.value, part.row, part.col, part.stats)
            second.add_stats(part.declared, part.stats, group, 2, (part.target,))
    second.run()


def overwrite(target: QuantizedTensor, row: Storage | None, col: Storage | None, changed: Tensor | None = None) -> None:
    """Copy the buffers of these operands into the target's buffers. Where ``changed``, which stays on its device, is 0,
    write the target's own bytes."""
    target.writes.count += 1
    for old, new in zip(target.stored, (row, col), strict=True):
        if old is not None and new is not None:
            for buffer, new_buffer in zip(old.tensors(), new.tensors(), strict=True):
                if changed is not None:
                    chosen: Tensor = torch.where(changed != 0, bytes_of(new_buffer), bytes_of(buffer))
                    bytes_of(buffer).copy_(chosen)
                else:
                    buffer.copy_(new_buffer)
