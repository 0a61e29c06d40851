"""Choosing and launching kernels."""

from lpq.ops.table import Choice, KernelError, choose

__all__ = ["Choice", "KernelError", "choose"]
