"""Tensors that can be encoded, and how they are matrices."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_input(x: Tensor) -> None:
    """Check that the input is a floating tensor of at most fp32, in which everything is computed."""
    if not isinstance(x, Tensor):
        raise TypeError(f"a tensor can be encoded, and not a {type(x).__name__}")
    if x.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"the tensor to encode is {x.dtype}; lpq encodes {names}: cast it first")


def as_matrix(x: Tensor) -> Tensor:
    """View a tensor as a matrix: all leading dimensions are rows, and a vector is one row."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.reshape(1, -1)
