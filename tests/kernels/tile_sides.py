"""How an operand is made tile by tile, by the CUDA kernels of its format."""

from __future__ import annotations

from typing import Any

from lpq import registry
from lpq.core import Quantizer
from lpq.formats.format import Direction
from lpq.registry import KernelSpec


def on_cuda(op: str, quantizer: Quantizer) -> KernelSpec | None:
    """The CUDA kernel of a quantizer's format for an operation."""
    name = registry.format_of(type(quantizer)).name
    found = (k for plugin in registry.plugins() for k in plugin.kernels if name in k.formats)
    return next((k for k in found if k.op == op and k.backend == "cuda"), None)


def side_of(quantizer: Quantizer | None, direction: Direction, op: str = "tile") -> Any:
    """The side of a pair that encodes this operand; None for none."""
    if quantizer is None:
        return None
    kernel = on_cuda(op, quantizer)
    assert kernel is not None
    return registry.resolve(kernel.impl)(quantizer, direction)
