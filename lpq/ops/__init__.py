"""Choosing and launching kernels."""

from lpq.ops.errors import KernelError
from lpq.ops.table import Choice, choose

__all__ = ["Choice", "KernelError", "choose"]
