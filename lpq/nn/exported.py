"""A layer as ``torch.export`` takes it: forward, and a gradient that is refused.

What is exported is a graph of forward, which holds neither the other two products nor what they need. So autograd would
have no gradient for it, or that of another recipe. Where all three products are in high precision, autograd's is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lpq.core.operators import define

if TYPE_CHECKING:
    from lpq.nn.linear import Plan


class _NoBackward:
    """In place of autograd's context: nothing is kept."""

    needs_input_grad = (False, False, False)

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep nothing."""


def forward_of(multiply: Any) -> Callable[..., Tensor]:
    """Forward of an autograd function, outside of it: autograd sees the operators, which refuse a gradient."""
    return partial(_forward, multiply)


def _forward(multiply: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, *rest: Any) -> Tensor:
    y: Tensor = multiply.forward(_NoBackward(), x, weight, bias, plan, *rest)
    row, col = ([q.side(side).plain for q in (plan.x, plan.w, plan.dy)] for side in ("row", "col"))
    if row[0] and row[1] and not all(row + col):  # y is a product of torch's, with a gradient of its own
        return cast("Tensor", torch.ops.lpq.forward_only(y, x, weight))
    return y


def _forward_only(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return y.clone()


def _forward_only_fake(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(y)


define("forward_only(Tensor y, Tensor x, Tensor weight) -> Tensor", _forward_only, _forward_only_fake)
