"""Gradients of weights that backward adds in place: whether it does so, and to which tensor."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lpq.nn.wanted import computes

Accumulate = Literal["grad", "main_grad"]


def is_summed(node: Any) -> bool:
    """Whether this backward adds the gradient of the weight itself, in place of autograd's node."""
    return computes(node, returned=False)


def sum_in_place(weight: Tensor, where: Accumulate) -> Tensor | None:
    """The tensor to which backward adds the gradient of the weight in place; None: there is no ``.grad`` yet."""
    if where == "grad":
        return weight.grad
    into: Tensor | None = getattr(weight, "main_grad", None)
    if into is None:
        raise RuntimeError(
            f"a weight of {[*weight.shape]} had a main_grad in forward and has none in backward, which adds to it: "
            "empty it with zero_(), after backward"
        )
    return into
