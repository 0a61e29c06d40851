"""A layer as ``torch.export`` takes it: forward, and a gradient that is refused.

An export is a graph of forward, which holds neither the other two products nor their operands. So autograd would have
no gradient for it, or the gradient of another recipe. Where all three products are in high precision, autograd's
gradient is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lpq.nn.multiply import LayerCall
from lpq.tensor import QuantizedTensor


class _NoBackward:
    """A stand-in for autograd's context that keeps nothing."""

    needs_input_grad = (False, False, False)

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep nothing."""


def forward_of(multiply: Any, title: str, weight: Tensor) -> Callable[..., Tensor]:
    """Forward of an autograd function, outside of it: autograd records the operators, and the last one refuses a
    gradient. The layer with this title and weight is refused if the graph could not hold the weight."""
    if isinstance(weight, QuantizedTensor):
        raise RuntimeError(
            f"{title}: torch.export takes no weight that is stored quantized. Write the decoded weights by "
            'lpq.export(model, path, layout="lpq", decode=True), load it by lpq.checkpoint.import_file into a model '
            "that was converted without weights=, and export that; or write the codes for an inference engine by "
            "lpq.export"
        )
    return partial(_forward, multiply)


def _forward(multiply: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall) -> Tensor:
    shapes, plan = call.shapes._replace(needs_dx=False, needs_dw=False), call.plan
    y: Tensor = multiply.forward(_NoBackward(), x, weight, bias, call._replace(shapes=shapes))
    sides = [q.side(direction) for q in (plan.x, plan.w, plan.dy) for direction in ("row", "col")]
    if not call.ends and all(side.plain for side in sides):  # y is a product of torch's, with a gradient of its own
        return y
    return cast("Tensor", torch.ops.lpq.forward_only(y, x, weight))
