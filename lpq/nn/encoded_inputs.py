"""Inputs that are encoded before they get to a layer: ``layer(quantizer.quantize(x))``.

The layer multiplies their operands and encodes nothing. The gradient of such an input is an ordinary tensor, like that
of a stored weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lpq import registry
from lpq.formats.groups import why_not_row_by_row
from lpq.operations.operators import opaque_when_traced

if TYPE_CHECKING:
    from lpq.formats.format import Direction, Quantizer
    from lpq.nn.plan import Plan
    from lpq.tensor import QuantizedTensor

Buffers = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The buffers of the row operand and of the column operand."""


def input_buffers(title: str, plan: Plan, x: QuantizedTensor, needs_dw: bool) -> Buffers:
    """The buffers of an encoded input, as the layer's recipe would encode it; ``title`` names the layer in messages.

    The column operand is there only with ``needs_dw``: it serves no other product.
    """
    if any(memory.tensor == "x" for memory in plan.memories):
        raise ValueError(
            f"{title}: the input is encoded already, and its recipe, with x={plan.x}, remembers statistics of inputs "
            "across steps: pass the tensor before it is encoded"
        )
    text = plan.x.text
    return _buffers(x, "row", text, title), _buffers(x, "col", text, title) if needs_dw else ()


def row_buffers(title: str, plan: Plan, x: QuantizedTensor) -> Sequence[Tensor]:
    """The buffers of the row operand of encoded rows in groups; the column operand of each group is made from it."""
    reason = why_not_row_by_row(plan.x)
    if reason is not None:
        raise ValueError(
            f"{title}: its input is encoded already, and groups of rows are not what x={plan.x} makes of all together: "
            f"{reason}. Pass the rows before they are encoded"
        )
    return _buffers(x, "row", plan.x.text, title)


def _buffers_of(x: QuantizedTensor, direction: Direction, text: str, title: str) -> list[Tensor]:
    """The buffers of one operand. It takes a string, for ``torch.compile``, which passes tensors and constants only."""
    quantizer: Quantizer = registry.quantizer(text)
    alike = x.quantizer.side(direction) == quantizer.side(direction)
    if not alike or (direction == "col" and x.quantizer.col_source != quantizer.col_source):
        raise ValueError(
            f"{title}: the {direction} operand of the input is encoded as {x.quantizer}, and its recipe encodes "
            f"inputs as {text}: encode it with lpq.quantizer({text!r}), pass the tensor before it is encoded, or give "
            f"the layer a recipe with x={x.quantizer}"
        )
    try:
        return x.operand(direction).tensors()
    except ValueError as error:
        raise ValueError(f"{title}: its input is encoded already, and {error}") from None


_buffers = opaque_when_traced(_buffers_of)
