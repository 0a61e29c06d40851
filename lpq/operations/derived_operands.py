"""Properties that follow from both sides of a quantizer: whether it encodes with random bits, and whether the column
operand follows from the row operand, so that only one of the two is kept or sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Storage
from lpq.formats.stacks import is_stack
from lpq.kernels import choose
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.table import kernels_allowed
from lpq.operations.binding import Operand, Transpose, operand_like
from lpq.operations.decoding import decode
from lpq.operations.operators import can_call_directly
from lpq.operations.quantizing import quantize
from lpq.operations.transposing import transpose

if TYPE_CHECKING:
    from lpq.formats.format import Quantizer


def rounds_stochastically(quantizer: Quantizer) -> bool:
    """Whether either operand is rounded with random bits."""
    return quantizer.side("row").stochastic or quantizer.side("col").stochastic


def derives_col(quantizer: Quantizer) -> bool:
    """Whether the column operand follows from the row operand alone."""
    row = quantizer.side("row")
    return quantizer.col_source == "row" or (row.transposable and quantizer.side("col") == row)


def derive_col(quantizer: Quantizer, row: Storage) -> Storage:
    """The column operand that follows from the row operand: its transpose, or an encoding of what it decodes to."""
    if quantizer.col_source == "original":
        return transpose(row)
    _, col, _ = quantize(decode(row, torch.float32), None, None, quantizer.side("col"))
    assert col is not None
    return col.astype(row.dtype)  # it stands for the tensor, not for what was decoded


def bind_derive(
    quantizer: Quantizer, row: Operand, device: torch.device
) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """``derive_col`` of the buffers of a row operand; by a bound kernel, where it may be called by itself."""
    rows, cols = row.shape

    def derived(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        return derive_col(quantizer, row.over(buffers)).tensors()

    if quantizer.col_source == "row" or rows * cols == 0 or torch.compiler.is_compiling():
        return derived
    turn = _bound(row, device, kernels_allowed())
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


def bind_derive_into(quantizer: Quantizer, row: Storage, out: Sequence[Tensor]) -> Callable[[], None]:
    """A function that writes the buffers of the column operand that ``derive_col`` makes over ``out``, which lie in
    memory as ``Storage.empty`` allocates them. The buffers of ``row`` are read when it is called, on their device."""
    turn = None
    if quantizer.col_source == "original" and not is_stack(row.shape) and all(row.shape):
        turn = _bound(operand_like(row), row.device, kernels_allowed())
    if turn is not None:
        return partial(turn, [t.contiguous() for t in row.tensors()], out)

    def derive() -> None:
        for target, made in zip(out, derive_col(quantizer, row).tensors(), strict=True):
            target.copy_(made)

    return derive


def _bind(operand: Operand, device: torch.device) -> Transpose | None:
    bind = choose("transpose", (operand.quantizer.text,), device).bind
    return bind(operand, device) if bind is not None else None


_bound = registry.cached_few(lambda operand, device, kernels: _bind(operand, device))
