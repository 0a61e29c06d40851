"""Counting the products of encoded operands by PyTorch's own counter of floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lpq import operations as _defines_the_operator  # noqa: F401


def product_flops(*arguments: Any, **_: Any) -> int:
    """Count ``lpq::gemm`` as any product of matrices, without the operations of encoding and decoding."""
    (rows, contraction), (cols, _contraction) = arguments[5:7]  # shape_a and shape_b
    return int(2 * rows * cols * contraction)


FLOPS: dict[Any, Callable[..., int]] = {torch.ops.lpq.gemm: product_flops}
"""``torch.utils.flop_counter.FlopCounterMode(custom_mapping=FLOPS)`` counts a converted model like any other."""
