"""Counting the products of encoded operands by PyTorch's own counter of floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lpq import operations as _defines_the_operators  # noqa: F401
from lpq.torch_private.operators import grouped_matmul


def product_flops(at: int, *arguments: Any, out_shape: Any, **_: Any) -> int:
    """Count a product as any product of matrices. The argument ``at`` has the shape of its first operand."""
    return int(2 * out_shape[-2] * out_shape[-1] * arguments[at][-1])


PLACES = {torch.ops.lpq.gemm: 5, torch.ops.lpq.multiply_groups: 6, grouped_matmul: 0}
FLOPS: dict[Any, Callable[..., int]] = {product: partial(product_flops, at) for product, at in PLACES.items()}
"""PyTorch's ``FlopCounterMode(custom_mapping=FLOPS)`` counts a converted model like any other, and experts in both."""
