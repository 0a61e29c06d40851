"""Gradients of weights that backward adds in place: where to, and whether it is to."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lpq.torch_private import autograd

Accumulate = Literal["grad", "main_grad"]


def is_summed(node: Any) -> bool:
    """Whether this backward is to add to the gradient of the weight, which this node of autograd's does otherwise."""
    try:
        return autograd.will_execute(node)
    except RuntimeError as error:  # which is how it says that torch.autograd.grad is to return the gradient
        if "autograd.grad()" in str(error):
            return False
        raise


def sum_in_place(weight: Tensor, where: Accumulate) -> Tensor | None:
    """What the gradient of the weight is to be added to, in place; None: there is no ``.grad`` yet."""
    if where == "grad":
        return weight.grad
    into: Tensor | None = getattr(weight, "main_grad", None)
    if into is None:
        raise RuntimeError(
            f"a weight of {[*weight.shape]} had a main_grad in forward and has none in backward, which adds to it: "
            "empty it with zero_(), after backward"
        )
    return into
