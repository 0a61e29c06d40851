"""Weights that are encoded already, held or stored so; and a check whether a weight was changed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.formats.rotation import TURN
from lpq.nn.encoded_inputs import Buffers
from lpq.nn.plan import Plan
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import Gathered
from lpq.tensor.quantized_tensor import Writes
from lpq.tensor.traced import operand_tensors
from lpq.torch_private.memory import storage_number
from lpq.torch_private.tensors import version_of


@dataclass(frozen=True, eq=False)
class HeldWeight:
    """A weight encoded once for several passes."""

    row: Sequence[Tensor]
    col: Sequence[Tensor]
    """The buffers of its operands."""
    weight: Tensor
    quantizer: Quantizer
    stamp: tuple[object, ...]
    """The value of ``write_stamp`` for the weight when it was encoded."""
    memory: Tensor
    """The memory of the weight, kept so that no other memory gets its address."""
    stats: list[Tensor]
    """The statistics that its state takes when it is released: until then observers get the state it was encoded by."""

    def is_of(self, weight: Tensor, quantizer: Quantizer) -> bool:
        """Whether this is still the weight, unchanged and encoded by this quantizer."""
        return self.weight is weight and self.quantizer == quantizer and self.stamp == write_stamp(weight)


def weight_operands(plan: Plan, weight: Tensor, held: HeldWeight | None, col: bool) -> Buffers | None:
    """The buffers of the operands of a weight that is encoded already; None for another. A column operand that is made
    at use is none of them."""
    col = col and not plan.w_at_use
    if held is not None:
        return held.row, held.col if col else ()
    if not isinstance(weight, QuantizedTensor):
        return None
    traced = torch.compiler.is_compiling()
    if not traced and weight.operand_cache is not None and weight.operand_cache[0] is plan.w:
        return weight.operand_cache[1], weight.operand_cache[2] if col else ()
    row = operand_tensors(weight, "row", plan.w.side("row").text)
    if not col:
        return row, ()
    of_col = operand_tensors(weight, "col", plan.w.side("col").text)
    if not traced and None not in weight.stored:  # else an operand is derived, anew each time
        weight.operand_cache = plan.w, row, of_col, None
    return row, of_col


def turn_of(quantizer: Quantizer, operands: Buffers | None) -> Tensor | None:
    """The number by which an encoded column operand was rotated, which the gradient takes over; None if it has none."""
    names = quantizer.side("col").names
    if operands is None or len(operands[1]) != len(names) or TURN not in names:
        return None
    return operands[1][names.index(TURN)]


def write_stamp(weight: Tensor) -> tuple[object, ...]:
    """A value that changes when the weight is written to, or gets other memory or another dtype. Autograd does not
    count writes through ``.data``, to a tensor made under ``torch.inference_mode``, or by fused optimizers; a gathered
    weight counts its own writes."""
    version = None if weight.is_inference() else version_of(weight)
    if isinstance(weight, QuantizedTensor):
        count = weight.writes.count  # as its write_count, without a call
    else:
        count = weight.write_count if isinstance(weight, Gathered) else 0
    memory = storage_number(weight.untyped_storage()), weight.storage_offset(), weight.stride()
    return version, count, weight.dtype, memory


class Unwritten(NamedTuple):
    """A quantized tensor that backward needs unchanged since forward. The tensor is not kept, as it has an operand that
    only forward needs. Its count of writes is kept, which views share that may outlive the tensor.

    Backward compares these fields itself: each pass does it for each tensor."""

    what: str
    """``a weight`` or ``an input``, for the message."""
    title: str
    shape: torch.Size
    writes: Writes
    written: int
    """The number of writes in forward."""
    tensor: ref[QuantizedTensor] | None = None
    """The tensor, if it may get other memory or another dtype, as a parameter does."""
    stamp: tuple[object, ...] = ()
    """The value of ``write_stamp`` for this tensor in forward."""

    def error(self) -> RuntimeError:
        """The error for a tensor that was written to since."""
        whose = f"{self.title}: " if self.title else ""
        return RuntimeError(
            f"{whose}{self.what} of {[*self.shape]} that is stored quantized was written to after forward, and "
            "backward needs it as it was: write to it after backward"
        )
