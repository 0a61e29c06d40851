"""Kernels of norms in CUDA C++ beside the one that computes and encodes the elements: what rows have in common, and
gradients.

Both take what a residual adds along: the first the sum before the norm, the second the sum of gradients behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import Allocate, Fresh, allocator, fresh
from lpq.kernels.tiles import INPUTS, Launch, at_once
from lpq.operations.norms import NormKind
from lpq.operations.produced_tiles import aligned

Rows = Callable[[Tensor], tuple[Tensor, ...]]
"""``find(x)``: what ``NormKind.rows`` returns."""
SumRows = Callable[[Tensor, Tensor], tuple[Tensor, tuple[Tensor, ...]]]
"""``find(x, residual)``: ``x + residual``, and what ``NormKind.rows`` returns of it."""
Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor | None]]
"""``gradients(dy, x, weight, factor, of_weight, other)``: the gradient of the input and, if it is wanted, of the
weight. ``other``: a gradient that the input has from elsewhere, which is added."""
ROWS_OF_BLOCK = 4
NORM_ROWS = CudaKernel("common/norm_rows.cu", "norm_rows", "PPPPPfqq", threads=32 * ROWS_OF_BLOCK, waits=True)
BATCH = 2048
"""The bytes of a row that a warp reads at once."""
PIECE = 16
"""The bytes of a row that a thread of ``NORM_GRADIENTS`` has."""
NORM_GRADIENTS = {
    threads: CudaKernel("common/norm_gradients.cu", "norm_gradients", "PPPPPPPqq", threads=threads, waits=True)
    for threads in (128, 256, 512, 1024)
}
"""By the threads of a block."""
COLUMN_SUMS = CudaKernel("common/column_sums.cu", "column_sums", "PPqq", threads=1024, waits=True)
COLUMNS_OF_BLOCK = 32


def gradient_threads(norm: NormKind, cols: int, dtype: torch.dtype) -> int | None:
    """Return the threads of a block that computes gradients of rows of ``cols`` elements; None where no kernel does."""
    if norm.centers:
        return None
    return next((count for count in NORM_GRADIENTS if count * PIECE >= cols * dtype.itemsize), None)


def bind_rows(norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Rows:
    """Return what finds the numbers that the rows of matrices have in common. These are contiguous."""
    launch, (empty, column, eps) = _bind_rows(norm, shape, dtype, device)

    def find(x: Tensor) -> tuple[Tensor, ...]:
        factor, mean = empty(*column), empty(*column) if norm.centers else None
        launch(x.data_ptr(), 0, 0, 0 if mean is None else mean.data_ptr(), factor.data_ptr(), eps, *shape)
        return (factor,) if mean is None else (mean, factor)

    return find


def bind_sum_rows(norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> SumRows:
    """Return what adds two matrices, which are contiguous, and finds those numbers of the sum."""
    launch, (empty, column, eps) = _bind_rows(norm, shape, dtype, device, "LPQ_RESIDUAL")
    matrix = fresh(shape, dtype)

    def find(x: Tensor, residual: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        total, factor, mean = empty(*matrix), empty(*column), empty(*column) if norm.centers else None
        launch(
            x.data_ptr(), residual.data_ptr(), total.data_ptr(), 0 if mean is None else mean.data_ptr(),
            factor.data_ptr(), eps, *shape,
        )  # fmt: skip
        return total.view(x.shape), (factor,) if mean is None else (mean, factor)

    return find


def _bind_rows(
    norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *switches: str
) -> tuple[Launch, tuple[Allocate, Fresh, float]]:
    """The kernel of rows, and what it is given: memory for a number of each row, and eps."""
    kept = next((count for count in (1, 2, 4, 8) if count * BATCH >= shape[1] * dtype.itemsize), 0)
    macros = (INPUTS[dtype], *(("LPQ_CENTERED", f"LPQ_BATCHES={kept}") if norm.centers else ()), *switches)
    launch = NORM_ROWS.bind(device.index or 0, macros, -(-shape[0] // ROWS_OF_BLOCK))
    return launch, (allocator(device), fresh((shape[0], 1), torch.float32), norm.epsilon)


def bind_gradients(
    norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Gradients | None:
    """Return what computes gradients from one read, in the order of a row's and a column's sum that is its own; None
    where no kernel does."""
    (rows, cols), index = shape, device.index or 0
    if (threads := gradient_threads(norm, cols, dtype)) is None:
        return None
    switches = (("LPQ_ROUNDS", norm.rounds), ("LPQ_OFFSET", norm.offset))
    macros = (INPUTS[dtype], f"LPQ_BLOCK={threads}", *(name for name, wanted in switches if wanted))
    blocks = at_once(rows, 1024 // threads, index)
    empty, matrix, sums = allocator(device), fresh(shape, dtype), fresh((blocks, cols), torch.float32)
    add_up, vector = COLUMN_SUMS.bind(index, (INPUTS[dtype],), -(-cols // COLUMNS_OF_BLOCK)), fresh((cols,), dtype)

    @cache
    def bound(*switches: str) -> Launch:
        return NORM_GRADIENTS[threads].bind(index, (*macros, *switches), blocks)

    bound()

    def compute(
        dy: Tensor, x: Tensor, weight: Tensor, factor: Tensor, of_weight: bool, other: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        dy, x, weight = aligned(dy, x, weight)
        if other is None:
            launch = bound()
        else:
            launch, (other,) = bound("LPQ_RESIDUAL"), aligned(other)
        dx, parts = empty(*matrix), empty(*sums) if of_weight else None
        launch(
            x.data_ptr(), dy.data_ptr(), weight.data_ptr(), factor.data_ptr(), 0 if other is None else other.data_ptr(),
            dx.data_ptr(), 0 if parts is None else parts.data_ptr(), rows, cols,
        )  # fmt: skip
        if parts is None:
            return dx.view(x.shape), None
        of_the_weight = empty(*vector)
        add_up(parts.data_ptr(), of_the_weight.data_ptr(), blocks, cols)
        return dx.view(x.shape), of_the_weight

    return compute
