"""The error of kernels."""

from __future__ import annotations

from lpq.registry.errors import LpqError


class KernelError(LpqError):
    """Kernels that were asked for cannot be had, or one cannot be compiled or launched."""
