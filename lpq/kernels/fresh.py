"""Memory that a bound operation allocates at each call, with all constant arguments fixed beforehand."""

from __future__ import annotations

import torch

from lpq.torch_private.memory import Allocate, allocator

__all__ = ["Allocate", "Fresh", "allocator", "fresh", "fresh_by_columns"]

Fresh = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a tensor: the arguments of the function that ``allocator`` returns."""


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Fresh:
    """The arguments with which a contiguous tensor is allocated."""
    strides, apart = [], 1
    for size in reversed(shape):
        strides.append(apart)
        apart *= max(size, 1)
    return shape, tuple(reversed(strides)), dtype


def fresh_by_columns(rows: int, cols: int, dtype: torch.dtype) -> Fresh:
    """The arguments with which a column-major matrix (``Buffer.column_major``) is allocated."""
    return (rows, cols), (1, max(rows, 1)), dtype
