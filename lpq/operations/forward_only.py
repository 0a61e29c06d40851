"""The operator by which a program of ``torch.export`` refuses a gradient.

It is defined below the layers, so that a program loads once lpq is imported."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from lpq.operations.operators import LIBRARY, define


def _refuse_gradient(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "no gradient flows through torch.ops.lpq.forward_only: backward is part of the layer, and a module that "
        "torch.export made has forward only. Train the module that was exported, or call this one under torch.no_grad()"
    )


define(
    "forward_only(Tensor y, Tensor x, Tensor weight) -> Tensor",
    lambda y, x, weight: y.clone(),
    lambda y, x, weight: torch.empty_like(y),
)
torch.library.register_autograd("lpq::forward_only", _refuse_gradient, lib=LIBRARY)
