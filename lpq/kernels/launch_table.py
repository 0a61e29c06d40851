"""Launches over several matrices of any shapes: a table on the device has a line for each.

The source of their kernels includes ``table.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.kernels.cuda import CudaKernel
from lpq.kernels.host_to_device import on_device
from lpq.kernels.tiles import reading

THREADS = 256


class TableLaunch(NamedTuple):
    """A launch that is bound to addresses."""

    run: Callable[[], None]
    table: Tensor
    """The table that it reads, which must stay."""


def kernel_of_table(source: str, name: str) -> CudaKernel:
    """A kernel that takes a table and the number of its lines."""
    return CudaKernel(source, name, "Pq", threads=THREADS, waits=True)


def rounding(dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that round fp32 elements to ``dtype`` as they are read."""
    return () if dtype is torch.float32 else reading(torch.float32, dtype)


def bind_table(
    kernel: CudaKernel, macros: tuple[str, ...], lines: Sequence[tuple[Sequence[int], int]], device: torch.device
) -> TableLaunch:
    """``lines``: for each matrix the numbers that the kernel reads, of 8 bytes each, and how many blocks of threads it
    takes."""
    *firsts, total = accumulate((blocks for _, blocks in lines), initial=0)
    table = [(*numbers, first) for (numbers, _), first in zip(lines, firsts, strict=True)]
    there = on_device(table, torch.int64, device)
    launch = kernel.bind(device.index or 0, macros, total)
    return TableLaunch(partial(launch, there.data_ptr(), len(table)), there)
