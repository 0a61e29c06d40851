"""Inputs that are encoded before they get to a layer, ``layer(quantizer.quantize(x))``, and gradients of its output
that arrive encoded.

The layer multiplies their operands and encodes nothing. The gradient of such an input is an ordinary tensor, like the
gradient of a stored weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, compiler

from lpq import registry
from lpq.formats.format import Direction, Quantizer
from lpq.formats.sections import why_not_row_by_row
from lpq.nn.plan import Plan
from lpq.operations.binding import Encoded, on_device
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.encoder import Encoder, EncoderSpec, operands_of
from lpq.operations.operators import opaque_when_traced
from lpq.tensor import QuantizedTensor

Buffers = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The buffers of the row operand and of the column operand."""
Given = tuple[Sequence[Tensor], Sequence[Tensor], Any]
"""Both, and None; or a ``SharedColumn``, which makes the column operand of the second, in backward."""
SUMMED = "the gradient of its bias is a sum in high precision"
"""Why a layer that trains its bias takes no gradient that is encoded."""


def input_buffers(layer: Any, plan: Plan, x: QuantizedTensor, needs_dw: bool, by_own: bool = False) -> Buffers:
    """The buffers of an encoded input, as the layer's recipe would encode it.

    The column operand is there only with ``needs_dw``: it serves no other product. ``by_own``: the layer's own state
    encoded it.
    """
    why, basis = None, plan.x.side("col").basis
    if not by_own and "x" in plan.remembered:
        why = "remembers statistics of inputs across steps, which did not encode it"
    elif needs_dw and basis is not None and basis.drawn:
        why = "rotates inputs by signs that each pass draws for its gradients, too"
    if why is not None:
        raise ValueError(
            f"{layer.title}: the input is encoded already, and its recipe, with x={plan.x.text}, {why}: pass the "
            "tensor before it is encoded"
        )
    text, title = plan.x.text, layer.sized if compiler.is_compiling() else layer.title
    return _buffers(x, "row", text, title), _buffers(x, "col", text, title) if needs_dw else ()


def describe_encoding(x: QuantizedTensor) -> str:
    """Describe how an input is encoded, in all that decides whether a layer takes it: ranks must have it alike."""
    operands = zip(("row", "column"), x.stored, strict=True)
    return f"{x.quantizer.text} ({' and '.join(name for name, operand in operands if operand is not None)})"


def row_buffers(title: str, plan: Plan, x: QuantizedTensor) -> Sequence[Tensor]:
    """The buffers of the row operand of encoded rows in groups; the column operand of each group is made from it."""
    reason = why_not_row_by_row(plan.x)
    if reason is not None:
        raise ValueError(
            f"{title}: its input is encoded already, and x={plan.x} encodes a group of rows otherwise than all rows "
            f"together: {reason}. Pass the rows before they are encoded"
        )
    return _buffers(x, "row", plan.x.text, title)


def why_no_gradient(plan: Plan) -> str | None:
    """Why the gradient of the output of a layer may not arrive encoded; None if it may."""
    if "dy" in plan.remembered:
        return f"its recipe, with dy={plan.dy}, remembers statistics of gradients across steps"
    if rounds_stochastically(plan.dy):
        return f"its recipe, with dy={plan.dy}, rounds gradients with random bits, which each pass draws"
    return None


def of_given(spec: EncoderSpec) -> Encoder:
    """The encoder of tensors that are encoded already, with the operands that are wanted. It is given such a tensor, or
    the buffers of its operands."""

    def encode(given: QuantizedTensor | Buffers, known: object, seed: object) -> Encoded:
        if isinstance(given, tuple):
            return *given, ()
        row, col = (() if operand is None else operand.tensors() for operand in given.stored)
        return row, col, ()

    wanted: dict[Direction, bool] = {"row": spec.row, "col": spec.col}
    return Encoder(*operands_of(spec), encode, taken=tuple(side for side in wanted if wanted[side]))


def gradient_given(
    title: str, dy: QuantizedTensor, quantizer: Quantizer, encoder: Encoder, why_not: str | None
) -> QuantizedTensor:
    """Take a gradient that arrived encoded, with the operands that ``encoder`` takes. Refuse it unless they are as
    ``quantizer`` makes them. ``why_not``: why the layer takes no such gradient. ``title`` names the layer; a compiled
    one has no name here.
    """
    if why_not is None and not all(_is_alike(dy, side, quantizer) for side in encoder.taken):
        why_not = f"its recipe encodes gradients as {quantizer}"
    if why_not is None:
        try:
            with on_device(dy.device):
                operands = {side: dy.operand(side) for side in encoder.taken}
            return dy.with_operands(operands.get("row"), operands.get("col"), dy.shape, dy.dtype)
        except ValueError as error:
            why_not = str(error)
    raise TypeError(
        f"{title or 'a layer with a recipe'}: the gradient of its output, {list(dy.shape)}, arrived encoded as "
        f"{dy.quantizer}, and {why_not}. Return the gradient as it was before, or gradient.dequantize(), from the "
        "backward that encoded it"
    )


def _is_alike(t: QuantizedTensor, direction: Direction, quantizer: Quantizer) -> bool:
    """Whether an operand is encoded as this quantizer encodes it."""
    alike = t.quantizer.side(direction) == quantizer.side(direction)
    return alike and (direction == "row" or t.quantizer.col_source == quantizer.col_source)


def _buffers_of(x: QuantizedTensor, direction: Direction, text: str, title: str) -> list[Tensor]:
    """The buffers of one operand. It takes a string, for ``torch.compile``, which passes tensors and constants only."""
    quantizer: Quantizer = registry.quantizer(text)
    if not _is_alike(x, direction, quantizer):
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
