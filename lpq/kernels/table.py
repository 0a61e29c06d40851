"""The kernel table: the implementation that serves an operation for some formats on some device, and why no faster one.
The choice is made once for each operation, operands, device and ``LPQ_KERNELS``, then kept. ``LPQ_KERNELS`` is a
comma-separated list of the backends that may run (``reference``, ``torch``, ``triton``, ``cuda``); unset, all may. An
explicit list that cannot be met is an error: the table never falls back past it. A faulty kernel is passed over like
any other that cannot run here, and its reason names its plugin.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from lpq import registry
from lpq.kernels import cuda
from lpq.kernels.errors import KernelError, UnknownBackend
from lpq.registry import KernelSpec
from lpq.registry.errors import ImportStringError, words
from lpq.registry.operations import TABLE
from lpq.registry.specs import INT64_COUNTS

BACKENDS = ("reference", *registry.BACKENDS)
ENVIRONMENT = "LPQ_KERNELS"
NO_KERNEL = "its plugin names none"
NVIDIA_ONLY = "is for NVIDIA's GPUs, and this torch is built for AMD's (ROCm)"


@dataclass(frozen=True)
class Choice:
    """The implementation that serves an operation, and why no preferred one does."""

    backend: str
    """``reference``, or the backend of the kernel."""
    kernel: KernelSpec | None
    """None: the reference."""
    impl: Callable[..., Any] | None
    """The kernel's callable; None: the reference."""
    rejected: tuple[tuple[KernelSpec, str], ...]
    """The kernels that would have been preferred, and why each cannot run here."""
    bind: Callable[..., Callable[..., Any] | None] | None = None
    """The function that binds the kernel to a shape, if there is one."""
    several: Callable[..., Callable[..., Any] | None] | None = None
    """The function that binds it to several matrices."""
    broken: tuple[KernelSpec, ...] = ()
    """The kernels that cannot run anywhere: they cannot be imported, or their ``why_not`` raises."""

    def rounding(self, dtype: torch.dtype) -> Callable[..., Any]:
        """Wrap ``impl`` for a matrix that is first rounded to ``dtype``. Some kernels round it as they read it."""
        impl, kernel = self.impl, self.kernel
        assert impl is not None
        assert kernel is not None

        def run(x: torch.Tensor, *rest: Any) -> Any:
            if kernel.rounds and x.dtype is torch.float32:
                return impl(x, *rest, dtype=dtype)
            return impl(x.to(dtype), *rest)

        return run


def choose(op: str, operands: tuple[str, ...], device: torch.device) -> Choice:
    """Choose the implementation of an operation.

    Args:
        op: The operation's name, as in ``KernelSpec.op``.
        operands: The quantizers of the operands, as strings.
        device: The device on which it runs.
    """
    index = device.index
    if index is None and device.type == "cuda":  # it means the current one, which may be another the next time
        index = torch.cuda.current_device()
    return _choose(op, operands, device.type, index, kernels_allowed())


def optional(op: str, quantizer: Any, device: torch.device) -> Callable[..., Any] | str:
    """Return the kernel for an operation that a format need not have, or the reason why there is none."""
    try:
        choice = choose(op, (quantizer.text,), device)
    except KernelError as error:
        return str(error)
    return choice.impl or "; ".join(reason for _, reason in choice.rejected) or NO_KERNEL


P = ParamSpec("P")
T = TypeVar("T")
_KEY = os.environ.encodekey(ENVIRONMENT)


kernels_allowed: Callable[[], Any] = partial(os.environ._data.get, _KEY)  # type: ignore[attr-defined]
"""Returns the value of ``LPQ_KERNELS``, encoded, to be compared with an earlier one. ``os.environ.get`` takes 30 times
as long."""


def bound_once(function: Callable[P, T]) -> Callable[P, T]:
    """As ``registry.cached_few``, for results that depend on ``LPQ_KERNELS``, too: as what binds kernels does."""
    return registry.cached_few(function, kernels_allowed)


@registry.cached
def _choose(op: str, operands: tuple[str, ...], device: str, index: int | None, encoded: Any) -> Choice:
    forced = os.environ.decodevalue(encoded) if encoded is not None else None
    allowed = allowed_by(forced)
    quantizers = tuple(registry.quantizer(text) for text in operands)
    formats = tuple(registry.format_of(type(q)).name for q in quantizers)
    if 1 in TABLE[op].formats and len(set(formats)) == 1:
        formats = formats[:1]
    where = torch.device(device if index is None else f"{device}:{index}")
    rejected: list[tuple[KernelSpec, str]] = []
    broken: list[KernelSpec] = []
    for kernel in _candidates(op, formats, len(operands)):
        reason = _elsewhere(kernel, where, allowed)
        if reason is None:
            try:
                reason = _refusal(kernel, quantizers, where)
                if reason is None:
                    impl = _implementation(kernel.impl)
                    bind, several = (
                        _implementation(string) if string is not None else None
                        for string in (kernel.bind, kernel.several)
                    )
                    return Choice(kernel.backend, kernel, impl, tuple(rejected), bind, several, tuple(broken))
            except Exception as error:  # a faulty kernel must not take its format away
                reason = _fault(kernel, error)
                broken.append(kernel)
        rejected.append((kernel, reason))
    if "reference" not in allowed:
        reasons = "".join(f"\n  {k.backend} {k.impl}: {why}" for k, why in rejected) or "\n  it has none"
        raise KernelError(
            f"{ENVIRONMENT}={forced} leaves no kernel for {op} of {' and '.join(operands)} on {device}:{reasons}\n"
            f"Allow the reference as well: {ENVIRONMENT}={forced},reference"
        )
    return Choice("reference", None, None, tuple(rejected), broken=tuple(broken))


def _candidates(op: str, formats: tuple[str, ...], count: int) -> list[KernelSpec]:
    """The kernels for this operation on operands of these formats, the preferred first. At equal priority, kernels for
    these very formats come before kernels for any format."""
    for_any = registry.kernels(op, (registry.ANY,) * count) if count == 2 else ()
    return sorted([*registry.kernels(op, formats), *for_any], key=lambda kernel: -kernel.priority)


def allowed_by(forced: str | None) -> frozenset[str]:
    """The backends that a value of ``LPQ_KERNELS`` lets run."""
    names = frozenset(name.strip() for name in (forced or "").split(",")) - {""}
    if not names:
        return frozenset(BACKENDS)
    if unknown := names - set(BACKENDS):
        raise UnknownBackend(
            f"{ENVIRONMENT}={forced}: unknown {', '.join(sorted(unknown))}; choose from {', '.join(BACKENDS)}"
        )
    return names


def allowed_backends() -> frozenset[str]:
    """The backends that may run now. Raises ``UnknownBackend`` where ``LPQ_KERNELS`` names one that there is not."""
    return allowed_by(os.environ.get(ENVIRONMENT))


def why_not(
    kernel: KernelSpec,
    quantizers: tuple[Any, ...],
    device: torch.device,
    allowed: frozenset[str] = frozenset(BACKENDS),
) -> str | None:
    """Why a kernel cannot serve these quantizers on this device, or None when it can."""
    reason = _elsewhere(kernel, device, allowed)
    return _refusal(kernel, quantizers, device) if reason is None else reason


@bound_once
def lacking(kernel: KernelSpec, device: torch.device) -> str | None:
    """Why a kernel that belongs to no format may not run on a device; None: it may."""
    return why_not(kernel, (), device, allowed_backends())


@bound_once
def serves(kernel: KernelSpec, device: torch.device) -> bool:
    """Whether a kernel that belongs to no format may run on a device."""
    return lacking(kernel, device) is None


def _elsewhere(kernel: KernelSpec, device: torch.device, allowed: frozenset[str]) -> str | None:
    """Why it can do nothing on this device; None if it can."""
    if kernel.backend not in allowed:
        return f"{ENVIRONMENT} does not allow {kernel.backend}"
    if kernel.device != device.type:
        return f"runs on {kernel.device}, not on {device.type}"
    if kernel.device == "cuda" and getattr(torch.version, "hip", None) is not None:
        # AMD's architectures have numbers of the same form, which mean something else: gfx942 reads as 9.4.
        nvidia = kernel.backend == "cuda" or (kernel.min_sm, kernel.max_sm) != (None, None)
        return NVIDIA_ONLY if nvidia and kernel.backend != "triton" else None
    if kernel.device == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        sm = 10 * major + minor
        if kernel.min_sm is not None and sm < kernel.min_sm:
            return f"needs compute capability {kernel.min_sm / 10:.1f}, this GPU has {major}.{minor}"
        if kernel.max_sm is not None and sm > kernel.max_sm:
            return f"serves compute capability up to {kernel.max_sm / 10:.1f}, this GPU has {major}.{minor}"
    return None


def _refusal(kernel: KernelSpec, quantizers: tuple[Any, ...], device: torch.device) -> str | None:
    """Why the kernel does not serve these quantizers here: a module is missing, or its own ``why_not`` gives a reason.
    That runs code of its plugin, which may raise."""
    for module in kernel.requires:
        if not _installed(module):
            remedy = f": {cuda.INSTALL}" if module == cuda.NEEDED else ""
            return f"needs {module}, which is not installed{remedy}"
        if module == cuda.NEEDED and (refused := cuda.why_not(device)) is not None:
            return refused
    if kernel.op == "transpose" and not quantizers[0].transposable:
        return f"{quantizers[0]} is not transposable"
    counts = kernel.op in ("measure", "quantize") and any(stat.reduce == "sum" for q in quantizers for stat in q.stats)
    if counts and kernel.api_version < INT64_COUNTS:
        return "is of plugin interface 1, in which counts are in fp32; they are int64 since interface 2"
    if kernel.why_not is not None:
        elsewhere = device.type == "cuda" and device.index not in (None, torch.cuda.current_device())
        with torch.cuda.device(device) if elsewhere else nullcontext():  # the only device that it can inspect
            reason: str | None = registry.resolve(kernel.why_not)(*quantizers)
        return reason
    return None


def _implementation(string: str) -> Callable[..., Any]:
    impl = registry.resolve(string)
    if not callable(impl):
        raise KernelError(f"{string!r} is {impl!r}, which cannot be called")
    found: Callable[..., Any] = impl
    return found


def _fault(kernel: KernelSpec, error: Exception) -> str:
    """The error of a kernel in words, and whose fault it is."""
    plugin = registry.provider_of(kernel)
    whose = f"{plugin.title} is at fault: " if plugin else ""
    if isinstance(error, ImportStringError | KernelError):  # these name the import string
        return f"{whose}{error}"
    return f"{whose}asking whether {kernel.impl!r} serves this raised {words(error)}"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that would hold it
        return False
