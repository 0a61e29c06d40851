"""The errors of kernels."""

from __future__ import annotations

from lpq.registry.errors import LpqError, OptionError


class KernelError(LpqError):
    """Requested kernels are not available, or one cannot be compiled or launched."""


class UnknownBackend(KernelError, OptionError):
    """``LPQ_KERNELS`` has an unknown backend."""
