"""How an operand is made tile by tile, by the kernels of its format in CUDA C++ or in Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

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


def choose_triton(op: str, operands: tuple[str, ...], device: torch.device) -> SimpleNamespace:
    """As ``lpq.kernels.choose`` on a GPU that runs Triton alone, of what no reference has."""
    (quantizer,) = (registry.quantizer(text) for text in operands)
    found = registry.kernels(op, (registry.format_of(type(quantizer)).name,))
    impls = [registry.resolve(k.impl) for k in found if k.backend == "triton" and serves(k, quantizer)]
    return SimpleNamespace(impl=impls[0] if impls else None, rejected=())


def side_of(quantizer: Quantizer | None, direction: Direction, op: str = "tile") -> Any:
    """The side of a pair that encodes this operand; None for none."""
    if quantizer is None:
        return None
    kernel = on_cuda(op, quantizer)
    assert kernel is not None
    return registry.resolve(kernel.impl)(quantizer, direction)
