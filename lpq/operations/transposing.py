"""Transpose: from an operand to the operand of the transposed matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.formats.format import Storage
from lpq.formats.layout import check_there
from lpq.formats.sections import along, is_stack, matrices, stacked
from lpq.kernels import choose
from lpq.operations.binding import operand_of
from lpq.operations.format_calls import transpose_reference as transpose_reference
from lpq.operations.operators import can_call_directly, define, layout_hash, unaliased
from lpq.operations.sides import quantizer_of


def transpose(operand: Storage) -> Storage:
    """Return the transposed ``operand``: of the transposed matrix, or of the transposed matrices of a stack. The
    quantizer must be transposable."""
    quantizer, shape = operand.quantizer, along("col", operand.shape)
    if not quantizer.transposable:
        raise NotImplementedError(f"{quantizer} is not transposable: encode the transposed matrix in its place")
    if quantizer.plain:
        if not is_stack(operand.shape):
            return transpose_reference(operand)
        return operand.from_tensors([operand.tensors()[0].transpose(-2, -1)], quantizer, shape, operand.dtype)
    first = operand.tensors()[0]
    if can_call_directly(first):
        check_there(first)
        return _transposed(operand)
    text = quantizer.text
    out = torch.ops.lpq.transpose(operand.tensors(), text, operand.shape, operand.dtype, layout_hash(text))
    return quantizer.storage.from_tensors(out, quantizer, shape, operand.dtype)


def _transposed(operand: Storage) -> Storage:
    if is_stack(operand.shape):
        transposed, of = [_transposed(matrix) for matrix in matrices(operand)], operand.quantizer
        if transposed:
            return stacked(transposed)
        return of.storage.empty(of, along("col", operand.shape), operand.dtype, operand.device)
    impl = choose("transpose", (operand.quantizer.text,), operand.device).impl
    if impl is not None:
        result: Storage = impl(operand)
        return result
    result = transpose_reference(operand)
    buffers = unaliased(result.tensors(), operand.tensors())
    return result.from_tensors(buffers, result.quantizer, result.shape, result.dtype)


def _transpose(
    buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, layouts: str = ""
) -> list[Tensor]:
    return _transposed(operand_of(buffers, quantizer, shape, stored)).tensors()


def _transpose_fake(
    buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, layouts: str = ""
) -> list[Tensor]:
    side = quantizer_of(quantizer)
    assert side is not None
    return side.storage.empty(side, along("col", shape), stored, buffers[0].device).tensors()


define(
    'transpose(Tensor[] buffers, str quantizer, SymInt[] shape, ScalarType stored, str layouts="") -> Tensor[]',
    _transpose,
    _transpose_fake,
)
