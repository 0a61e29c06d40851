"""Gradients of weights that backward adds in place: where to, and when it may not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lpq.nn.linear import Layer

Accumulate = Literal["grad", "main_grad"]


def is_summed(node: Any) -> bool:
    """Whether this backward is to add to the gradient of the weight, which this node of autograd's does otherwise."""
    try:
        return torch._C._will_engine_execute_node(node)
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


def check_accumulation(layer: Layer, weight: Tensor) -> None:
    """An error if backward cannot add the gradient of this weight in place."""
    if layer.gathering is not None or torch.compiler.is_compiling():
        where = "torch.compile(fullgraph=True)" if layer.gathering is None else "a weight that FSDP2 gathers quantized"
        raise RuntimeError(f"{layer.title}: accumulate={layer.accumulate!r} does not work with {where}; leave it None")
    if layer.accumulate == "main_grad" and weight.requires_grad and torch.is_grad_enabled():
        into: Any = getattr(weight, "main_grad", None)
        fits = isinstance(into, Tensor) and into.is_floating_point() and into.device == weight.device
        if not fits or into.shape != weight.shape:
            of = [getattr(into, name, None) for name in ("dtype", "shape", "device")]
            raise RuntimeError(
                f"{layer.title}: accumulate='main_grad', and its weight has {'none' if into is None else of}: set "
                "weight.main_grad to zeros of the weight's shape, floating, on its device, before the first forward"
            )
