"""The errors of kernels."""

from __future__ import annotations

from lpq.registry.errors import LpqError, OptionError


class KernelError(LpqError):
    """Kernels that were asked for cannot be had, or one cannot be compiled or launched."""


class UnknownBackend(KernelError, OptionError):
    """``LPQ_KERNELS`` has a backend that is none."""
