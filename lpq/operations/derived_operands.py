"""Properties that follow from both sides of a quantizer: whether it encodes with random bits, and whether the column
operand follows from the row operand, so that only one of the two is kept or sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Quantizer, Storage
from lpq.formats.sections import is_stack
from lpq.kernels import choose
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.table import bound_once
from lpq.operations.binding import Operand, Transpose, Transposes, on_device, operand_like
from lpq.operations.decoding import decode
from lpq.operations.operators import can_call_directly
from lpq.operations.quantizing import quantize
from lpq.operations.recoding import bind_recode
from lpq.operations.transposing import transpose


def rounds_stochastically(quantizer: Quantizer) -> bool:
    """Whether either operand is rounded with random bits."""
    return bool(quantizer.side("row").stochastic or quantizer.side("col").stochastic)


def derives_col(quantizer: Quantizer) -> bool:
    """Whether the column operand can be computed from the row operand alone."""
    row = quantizer.side("row")
    return quantizer.col_source == "row" or (row.transposable and quantizer.side("col") == row)


def made_at_use(quantizer: Quantizer) -> bool:
    """Whether the column operand is made of the row operand with random bits, and so with the seed of one pass: of a
    row operand that is stored, held or gathered it is made where it is multiplied."""
    row, col = quantizer.side("row"), quantizer.side("col")
    return quantizer.col_source == "row" and bool(col.stochastic) and not row.stochastic and len(col.state) == 0


def derive_col(quantizer: Quantizer, row: Storage) -> Storage:
    """Compute the column operand from the row operand: its transpose, or an encoding of its decoded values."""
    if quantizer.col_source == "original":
        return transpose(row)
    if can_call_directly(row.tensors()[0]):
        recode = bind_recode(operand_like(row), quantizer.side("col"), row.device)
        if recode is not None:
            with on_device(row.device):
                buffers = recode(row.tensors())
            rows, cols = row.shape
            return Operand(quantizer.side("col"), (cols, rows), row.dtype).storage(buffers)
    _, col, _ = quantize(decode(row, torch.float32), None, None, quantizer.side("col"))
    assert col is not None
    return col.astype(row.dtype)  # it stands for the tensor, not for the decoded values


def bind_derive(
    quantizer: Quantizer, row: Operand, device: torch.device
) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """``derive_col`` of the buffers of a row operand; by a bound kernel, where it may be called by itself."""
    rows, cols = row.shape

    def derived(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        return derive_col(quantizer, row.storage(buffers)).tensors()

    if rows * cols == 0 or torch.compiler.is_compiling():
        return derived
    if quantizer.col_source == "row":
        recode = bind_recode(row, quantizer.side("col"), device)
        if recode is None:
            return derived
        return lambda buffers: recode(buffers) if can_call_directly(buffers[0]) else derived(buffers)
    turn = _bound(row, device)
    if turn is None:
        return derived
    memory, empty = [fresh(b.grid(cols, rows), b.dtype or row.dtype) for b in row.quantizer.layout], allocator(device)

    def derive(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        if not can_call_directly(buffers[0]):
            return derived(buffers)
        out = [empty(*one) for one in memory]
        turn([t.contiguous() for t in buffers], out)
        return out

    return derive


class Derived(NamedTuple):
    """A column operand to be derived."""

    quantizer: Quantizer
    row: Storage
    out: Sequence[Tensor]
    """The memory for the buffers of the column operand, as ``Storage.empty`` allocates them."""


def bind_derive_into(several: Sequence[Derived], device: torch.device) -> list[Callable[[], None]]:
    """Functions that write all these column operands, each as ``derive_col`` makes it; the buffers of the row operands
    are read when they are called, on their device. The operands of one quantizer take one function, if their kernel can
    take several."""
    alike: dict[str, list[Derived]] = {}
    bound: list[Callable[[], None]] = []
    for each in several:
        quantizer, row, _ = each
        if quantizer.col_source == "original" and not is_stack(row.shape) and all(row.shape):
            alike.setdefault(row.quantizer.text, []).append(each)
        else:
            bound.append(partial(_derive, each))
    for same in alike.values():
        operands = tuple(operand_like(row) for _, row, _ in same)
        turn = _bound_several(operands, device) if len(same) > 1 else None
        if turn is not None:
            rows = [[t.contiguous() for t in row.tensors()] for _, row, _ in same]
            bound.append(partial(turn, rows, [out for *_, out in same]))
            continue
        for each, operand in zip(same, operands, strict=True):
            one = _bound(operand, device)
            rows_of_one = [t.contiguous() for t in each.row.tensors()]
            bound.append(partial(_derive, each) if one is None else partial(one, rows_of_one, each.out))
    return bound


def _derive(one: Derived) -> None:
    for target, buffer in zip(one.out, derive_col(one.quantizer, one.row).tensors(), strict=True):
        target.copy_(buffer)


@bound_once
def _bound(operand: Operand, device: torch.device) -> Transpose | None:
    bind = choose("transpose", (operand.quantizer.text,), device).bind
    return bind(operand, device) if bind is not None else None


@bound_once
def _bound_several(operands: tuple[Operand, ...], device: torch.device) -> Transposes | None:
    bind = choose("transpose", (operands[0].quantizer.text,), device).several
    return bind(operands, device) if bind is not None else None
