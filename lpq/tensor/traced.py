"""Making a QuantizedTensor, and taking it apart, inside of ``torch.compile``: each of the two is one node to it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq import registry
from lpq.formats.format import Direction, Quantizer, Storage
from lpq.operations.operators import opaque_when_traced
from lpq.tensor.quantized_tensor import QuantizedTensor


def _operand_tensors(tensor: QuantizedTensor, direction: Direction, quantizer: str) -> list[Tensor]:
    """The buffers of ``tensor.operand(direction)``, which must be what this quantizer encodes.

    Also inside ``torch.compile``, which takes tensors and constants only.
    """
    operand = tensor.operand(direction)
    if operand.quantizer.text != quantizer:
        raise ValueError(
            f"{tensor.whose}the {direction} operand of this {list(tensor.shape)} tensor is stored as "
            f"{operand.quantizer}, and the recipe wants {quantizer}: use one with w={tensor.quantizer}; or make an "
            "ordinary weight of it, layer.weight = nn.Parameter(layer.weight.dequantize()); or, if FSDP2 gathered it, "
            "call reshard() of its module"
        )
    return operand.tensors()


operand_tensors = opaque_when_traced(_operand_tensors)


def wrap_operands(
    row: Storage | None,
    col: Storage | None,
    quantizer: Quantizer,
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype,
    group: ProcessGroup | None,
) -> QuantizedTensor:
    """A tensor over these operands; also inside ``torch.compile``, where only tensors and constants may meet."""
    if not torch.compiler.is_compiling() or group is not None:
        return QuantizedTensor(row, col, quantizer, shape, dtype, amax_group=group)
    both: tuple[tuple[Direction, Storage | None], ...] = (("row", row), ("col", col))
    operands = [(d, s) for d, s in both if s is not None]
    tensors = [t for _, s in operands for t in s.tensors()]
    sides = [(d, s.quantizer.text, list(s.shape), s.dtype) for d, s in operands]
    return _wrap_in_graph(tensors, sides, quantizer.text, list(shape), dtype)


def _wrap(
    tensors: list[Tensor],
    sides: list[tuple[Direction, str, list[int], torch.dtype]],
    quantizer: str,
    shape: list[int],
    dtype: torch.dtype,
) -> QuantizedTensor:
    operands = [(direction, registry.quantizer(text), matrix, stored) for direction, text, matrix, stored in sides]
    return QuantizedTensor.from_tensors(tensors, operands, registry.quantizer(quantizer), shape, dtype)


_wrap_in_graph = opaque_when_traced(_wrap)
