"""Kernels in Triton of norms beside the one that computes and encodes the elements: ``norm_kernels`` for any GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.kernels.tiles import at_once
from lpq.operations.norm_kernels import Gradients, Rows, SumRows
from lpq.operations.norms import NormKind


def bind_rows(norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Rows:
    """As ``norm_kernels.bind_rows``."""

    def find(x: Tensor) -> tuple[Tensor, ...]:
        return _rows(norm, x.view(shape), None, None)

    return find


def bind_sum_rows(norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> SumRows:
    """As ``norm_kernels.bind_sum_rows``."""

    def find(x: Tensor, residual: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        total = torch.empty_like(x)
        return total, _rows(norm, x.view(shape), residual, total)

    return find


def _rows(norm: NormKind, x: Tensor, residual: Tensor | None, total: Tensor | None) -> tuple[Tensor, ...]:
    from lpq.kernels.triton.norms import norm_rows

    factor = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    mean = torch.empty_like(factor) if norm.centers else None
    norm_rows(x, residual, total, mean, factor, norm.epsilon)
    return (factor,) if mean is None else (mean, factor)


def bind_gradients(
    norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Gradients | None:
    """As ``norm_kernels.bind_gradients``."""
    from lpq.kernels.triton.norms import WIDEST, norm_gradients, programs_at_once, rows_at_once

    rows, cols = shape
    if norm.centers or cols > WIDEST:
        return None
    programs = at_once(-(-rows // rows_at_once(cols)), programs_at_once(cols), device.index or 0)

    def compute(
        dy: Tensor, x: Tensor, weight: Tensor, factor: Tensor, of_weight: bool, other: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        matrix, same = x.contiguous().view(shape), None if other is None else other.contiguous()
        dx = torch.empty_like(matrix)
        parts = x.new_empty((programs, cols), dtype=torch.float32) if of_weight else None
        norm_gradients(
            matrix, dy.contiguous(), weight.contiguous(), factor, same, dx, parts, programs, norm.offset, norm.rounds
        )
        return dx.view(x.shape), None if parts is None else parts.sum(0).to(dtype)

    return compute
