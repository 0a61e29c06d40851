"""Decode: from an operand to the matrix that it stands for."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lpq.formats.format import Storage
from lpq.formats.layout import check_there
from lpq.formats.sections import is_stack, joined, matrices
from lpq.kernels import choose
from lpq.operations.binding import operand_of
from lpq.operations.format_calls import decode_reference as decode_reference
from lpq.operations.operators import can_call_directly, define, unaliased


def decode(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Return the matrix that an operand stands for, or the matrices of a stack, in memory of their own.

    Args:
        operand: The operand.
        dtype: The dtype of the matrix, to which each element is rounded once.
    """
    first = operand.tensors()[0]
    if operand.quantizer.plain:
        if not torch.compiler.is_compiling():
            check_there(first)
        if is_stack(operand.shape):
            return first.to(dtype, copy=True)
        return operand.decode().to(dtype, copy=True)
    if can_call_directly(first):
        check_there(first)
        return _decoded(operand, dtype)
    return cast(
        "Tensor",
        torch.ops.lpq.decode(operand.tensors(), operand.quantizer.text, operand.shape, operand.dtype, dtype),
    )


def _decoded(operand: Storage, dtype: torch.dtype) -> Tensor:
    if is_stack(operand.shape):
        first = operand.tensors()[0]
        if (whole := joined(operand)) is not None:
            return _decoded(whole, dtype).view(operand.shape)
        decoded_each = [_decoded(matrix, dtype) for matrix in matrices(operand)]
        return torch.stack(decoded_each) if decoded_each else first.new_empty(operand.shape, dtype=dtype)
    impl = choose("decode", (operand.quantizer.text,), operand.device).impl
    if impl is not None:
        decoded: Tensor = impl(operand, dtype)
        return decoded
    return unaliased([decode_reference(operand, dtype)], operand.tensors())[0]


def _decode(buffers: list[Tensor], quantizer: str, shape: list[int], stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    return _decoded(operand_of(buffers, quantizer, shape, stored), dtype)


define(
    "decode(Tensor[] buffers, str quantizer, SymInt[] shape, ScalarType stored, ScalarType dtype) -> Tensor",
    _decode,
    lambda buffers, quantizer, shape, stored, dtype: buffers[0].new_empty(shape, dtype=dtype),
)
