"""The kernel table: which implementation serves an operation for some formats on some device, and why not a faster one.

The answer is looked up once for each operation, operands, device and ``LPQ_KERNELS``, then remembered. ``LPQ_KERNELS``
is a comma-separated list of the backends that may run (``reference``, ``torch``, ``triton``, ``cuda``); unset, all may.
An explicit list that cannot be met is an error: the table never falls back past it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lpq import registry
from lpq.registry import KernelSpec
from lpq.registry.errors import LpqError

BACKENDS = ("reference", "torch", "triton", "cuda")
ENVIRONMENT = "LPQ_KERNELS"


class KernelError(LpqError):
    """An explicit request for kernels that cannot be met."""


@dataclass(frozen=True)
class Choice:
    """What runs."""

    backend: str
    """``reference``, or the backend of the kernel."""
    kernel: KernelSpec | None
    """None: the reference."""
    impl: Callable[..., Any] | None
    """The kernel's callable; None: the reference."""
    rejected: tuple[tuple[KernelSpec, str], ...]
    """The kernels that would have been preferred, and why each cannot run here."""


def choose(op: str, operands: tuple[str, ...], device: torch.device) -> Choice:
    """What serves ``op`` for operands of these quantizers (as strings) on this device."""
    return _choose(op, operands, device.type, device.index, os.environ.get(ENVIRONMENT))


@registry.cached
def _choose(op: str, operands: tuple[str, ...], device: str, index: int | None, forced: str | None) -> Choice:
    allowed = _allowed(forced)
    quantizers = tuple(registry.quantizer(text) for text in operands)
    formats = tuple(registry.format_of(type(q)).name for q in quantizers)
    if op != "gemm" and len(set(formats)) == 1:
        formats = formats[:1]
    rejected: list[tuple[KernelSpec, str]] = []
    for kernel in sorted(registry.kernels(op, formats), key=lambda k: -k.priority):
        reason = why_not(kernel, quantizers, torch.device(device if index is None else f"{device}:{index}"), allowed)
        if reason is None:
            return Choice(kernel.backend, kernel, registry.resolve(kernel.impl), tuple(rejected))
        rejected.append((kernel, reason))
    if "reference" not in allowed:
        reasons = "".join(f"\n  {k.backend} {k.impl}: {why}" for k, why in rejected) or "\n  it has none"
        raise KernelError(
            f"{ENVIRONMENT}={forced} leaves no kernel for {op} of {' and '.join(operands)} on {device}:{reasons}\n"
            f"Allow the reference as well: {ENVIRONMENT}={forced},reference"
        )
    return Choice("reference", None, None, tuple(rejected))


def _allowed(forced: str | None) -> frozenset[str]:
    if not forced:
        return frozenset(BACKENDS)
    names = frozenset(n.strip() for n in forced.split(","))
    if unknown := names - set(BACKENDS):
        raise KernelError(
            f"{ENVIRONMENT}={forced}: unknown {', '.join(sorted(unknown))}; choose from {', '.join(BACKENDS)}"
        )
    return names


def why_not(
    kernel: KernelSpec,
    quantizers: tuple[Any, ...],
    device: torch.device,
    allowed: frozenset[str] = frozenset(BACKENDS),
) -> str | None:
    """Why a kernel cannot serve these quantizers on this device, or None when it can."""
    if kernel.backend not in allowed:
        return f"{ENVIRONMENT} does not allow {kernel.backend}"
    if kernel.device != device.type:
        return f"runs on {kernel.device}, not on {device.type}"
    if kernel.device == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        sm = 10 * major + minor
        if kernel.min_sm is not None and sm < kernel.min_sm:
            return f"needs compute capability {kernel.min_sm / 10:.1f}, this GPU has {major}.{minor}"
        if kernel.max_sm is not None and sm > kernel.max_sm:
            return f"serves compute capability up to {kernel.max_sm / 10:.1f}, this GPU has {major}.{minor}"
    for module in kernel.requires:
        if not _installed(module):
            return f"needs {module}, which is not installed"
    if kernel.why_not is not None:
        reason: str | None = registry.resolve(kernel.why_not)(*quantizers)
        return reason
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that would hold it
        return False
