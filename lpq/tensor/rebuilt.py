"""The operands of a pickled tensor, checked before they are used: kernels read buffers as they are declared, and a file
may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer, Storage
from lpq.formats.layout import Buffer
from lpq.formats.sections import along, is_stack
from lpq.registry.errors import LpqError
from lpq.registry.showing import brief


class DamagedTensor(LpqError, ValueError):
    """The error where saved data is no quantized tensor, or no whole one."""


def check_flags(**flags: object) -> None:
    """Refuse a flag that is neither true nor false."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise _damaged(f"its {name} is {brief(value)}")


def set_attributes(parameter: Any, attributes: Any) -> Any:
    """Return a saved parameter with the attributes that others had set on it."""
    if not isinstance(attributes, Mapping | None):
        raise _damaged(f"its attributes are {brief(attributes)}")
    vars(parameter).update(parameter.given(attributes) if attributes else {})
    return parameter


def operands_of(quantizer: Any, sides: Any, shape: Any, dtype: Any) -> dict[str, Storage]:
    """The operands by direction, over these buffers."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise _damaged(f"its dtype is {brief(dtype)}")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise _damaged(f"its shape is {brief(shape)}")
    if not isinstance(sides, Mapping) or not sides or not set(sides) <= {"row", "col"}:
        raise _damaged(f"its operands are {brief(list(sides) if isinstance(sides, Mapping) else sides)}")
    whole = _side(quantizer)
    cols = shape[-1] if shape else 1
    matrix = (prod(shape[:-1]), cols)
    operands: dict[str, Storage] = {}
    for direction, operand in sides.items():
        if not isinstance(operand, tuple) or len(operand) != 4:
            raise _damaged(f"its {direction} operand is {brief(operand)}")
        text, buffers, rows_and_cols, stored = operand
        side = _side(text)
        if side != whole.side(direction):
            raise _damaged(f"its {direction} operand is stored as {side}, and the tensor as {whole}")
        in_stack = isinstance(rows_and_cols, tuple) and is_stack(rows_and_cols) and is_stack(shape)
        expected_shape = along(direction, shape if in_stack else matrix)
        if rows_and_cols != expected_shape or not isinstance(stored, torch.dtype) or not stored.is_floating_point:
            raise _damaged(
                f"its {direction} operand is of shape {brief(rows_and_cols)} and dtype {brief(stored)}, and "
                f"{list(expected_shape)} is wanted"
            )
        if not isinstance(buffers, Mapping) or set(buffers) != set(side.names):
            raise _damaged(f"its {direction} operand has not the buffers {', '.join(side.names)}")
        tensors = [_buffer(direction, b, buffers[b.name], expected_shape, b.dtype or stored) for b in side.layout]
        if len({t.device for op in operands.values() for t in op.tensors()} | {t.device for t in tensors}) > 1:
            raise _damaged("its buffers are on several devices")
        operands[direction] = side.storage.from_tensors(tensors, side, expected_shape, stored)
    return operands


def _side(text: Any) -> Quantizer:
    if not isinstance(text, str):
        raise _damaged(f"its quantizer is {brief(text)}")
    quantizer: Quantizer = registry.quantizer(text)
    return quantizer


def _buffer(direction: str, buffer: Buffer, tensor: Any, matrix: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A buffer in its declared dtype. One of 8-bit elements may have been saved as bytes."""
    what = f"the buffer {buffer.name} of its {direction} operand"
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise _damaged(f"{what} is {brief(tensor) if not isinstance(tensor, Tensor) else tensor.layout}")
    as_bytes = tensor.dtype == torch.uint8 and dtype.itemsize == 1
    *count, rows, cols = matrix
    grid = (*count, *buffer.grid(rows, cols))
    if tensor.shape != grid or not (as_bytes or tensor.dtype == dtype):
        raise _damaged(
            f"{what} is {tensor.dtype} of shape {list(tensor.shape)}, and {dtype} of shape {list(grid)} is wanted"
        )
    return tensor.contiguous().view(dtype)


def _damaged(why: str) -> DamagedTensor:
    return DamagedTensor(f"what was saved is no whole quantized tensor: {why}. Do not trust the file")
