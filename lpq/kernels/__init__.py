"""Choosing and launching kernels."""

from lpq.kernels.errors import KernelError
from lpq.kernels.table import Choice, choose

__all__ = ["Choice", "KernelError", "choose"]
