"""How an operand is made tile by tile, by the CUDA kernels of its format."""

from __future__ import annotations

from typing import Any

from lpq import registry
from lpq.core import Quantizer
from lpq.formats.format import Direction
from lpq.registry import KernelSpec


def on_cuda(op: str, quantizer: Quantizer) -> KernelSpec | None:
    """The CUDA kernel of a quantizer's format for an operation, if there are several the one that serves it."""
    name = registry.format_of(type(quantizer)).name
    found = [k for plugin in registry.plugins() for k in plugin.kernels if name in k.formats]
    found = [k for k in found if k.op == op and k.backend == "cuda"]
    return next((k for k in found if len(found) == 1 or serves(k, quantizer)), None)


def serves(kernel: KernelSpec, *sides: Quantizer) -> bool:
    return kernel.why_not is None or registry.resolve(kernel.why_not)(*sides) is None


def side_of(quantizer: Quantizer | None, direction: Direction, op: str = "tile") -> Any:
    """The side of a pair that encodes this operand; None for none."""
    if quantizer is None:
        return None
    kernel = on_cuda(op, quantizer)
    assert kernel is not None
    return registry.resolve(kernel.impl)(quantizer, direction)
