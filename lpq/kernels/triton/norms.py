"""Kernels of norms in Triton beside the one that encodes: what rows have in common, and gradients.

They compute what ``csrc/common/norm_rows.cu`` and ``norm_gradients.cu`` compute, and round where these round. Sums have
an order of their own.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lpq.kernels.triton.kernels import keeping_small_numbers, launch
from lpq.kernels.triton.numbers import widen
from lpq.kernels.triton.sources import nearest
from lpq.kernels.triton.tiles import load_tile, store_values

ELEMENTS = 2048
"""The elements of a tile, if rows that a program has at once have no more."""
PER_WARP = 512
"""The elements of a tile that a warp takes."""
WIDEST = 8192
"""The most columns of a row that a program has at once: 16 warps take them, which is as many as AMD's GPUs run."""


def rows_at_once(cols: int) -> int:
    """The rows that a program has at once."""
    high: int = max(ELEMENTS // triton.next_power_of_2(cols), 1)
    return high


def programs_at_once(cols: int) -> int:
    """The programs of a multiprocessor that compute gradients: together they have ``WIDEST`` elements of a matrix."""
    programs: int = WIDEST // max(triton.next_power_of_2(cols), ELEMENTS)
    return programs


@triton.jit
def _summed(x, residual, row, col, rows, cols, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """A tile of a matrix, or of the sum of two, rounded as PyTorch rounds it."""
    values = widen(load_tile(x, row, col, rows, cols, HIGH, WIDE))
    if residual is not None:
        others = widen(load_tile(residual, row, col, rows, cols, HIGH, WIDE))
        values = nearest(values + others, x.dtype.element_ty)
    return values


@triton.jit
def _norm_rows(
    x, residual, total, mean, factor, eps, rows, cols, count, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``total``: where the sum with ``residual`` goes; both may be None. ``mean``: None where the norm subtracts none.
    ``count``: the columns in fp32."""
    row = tl.program_id(0).to(tl.int64) * HIGH
    lines = row + tl.arange(0, HIGH)
    center = tl.zeros((HIGH,), tl.float32)
    if mean is not None:
        sums = tl.zeros((HIGH, WIDE), tl.float32)
        for col in range(0, cols, WIDE):
            sums += _summed(x, residual, row, col, rows, cols, HIGH, WIDE)
        center = tl.div_rn(tl.sum(sums, 1), count)
        tl.store(mean + lines, center, mask=lines < rows)
    squares = tl.zeros((HIGH, WIDE), tl.float32)
    for col in range(0, cols, WIDE):
        values = _summed(x, residual, row, col, rows, cols, HIGH, WIDE)
        if total is not None:
            store_values(total, values, row, col, rows, cols)
        apart = values
        if mean is not None:
            inside = col + tl.arange(0, WIDE)[None, :] < cols
            apart = tl.where(inside, values - center[:, None], 0.0)
        squares = tl.fma(apart, apart, squares)
    tl.store(factor + lines, libdevice.rsqrt(tl.div_rn(tl.sum(squares, 1), count) + eps), mask=lines < rows)


def norm_rows(
    x: Tensor, residual: Tensor | None, total: Tensor | None, mean: Tensor | None, factor: Tensor, eps: float
) -> None:
    """Write what rows of a matrix, or of the sum of two, have in common, and the sum. All are contiguous."""
    rows, cols = x.shape
    high = rows_at_once(cols)
    wide = ELEMENTS // high
    launch(
        _norm_rows, -(-rows // high), x, residual, total, mean, factor, eps, rows, cols, float(cols),
        HIGH=high, WIDE=wide, num_warps=ELEMENTS // PER_WARP, **keeping_small_numbers(_norm_rows),
    )  # fmt: skip


@triton.jit
def _norm_gradients(
    x, dy, weight, factor, other, dx, sums, rows, cols, count, programs, turns,
    OFFSET: tl.constexpr, ROUNDS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program takes tiles of whole rows in turn. ``other``: the gradient from elsewhere, or None; ``sums``: a row for
    each program, or None where the weight needs no gradient."""
    by = widen(load_tile(weight, 0, 0, 1, cols, 1, WIDE))
    if OFFSET:
        by = 1.0 + by
    of_weight = tl.zeros((HIGH, WIDE), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for turn in range(turns):
        row = (program + turn * programs) * HIGH
        lines = row + tl.arange(0, HIGH)
        of_x = widen(load_tile(x, row, 0, rows, cols, HIGH, WIDE))
        of_dy = widen(load_tile(dy, row, 0, rows, cols, HIGH, WIDE))
        r = tl.load(factor + lines, mask=lines < rows, other=0.0)[:, None]
        normed = of_x * r
        inner = of_dy * by
        if ROUNDS:
            inner = nearest(inner, x.dtype.element_ty)
            of_weight += nearest(of_dy * nearest(normed, x.dtype.element_ty), x.dtype.element_ty)
        else:
            of_weight += of_dy * normed
        back = tl.div_rn(tl.sum(inner * of_x, 1), count)[:, None] * r * r * r
        out = tl.fma(-of_x, back, inner * r)
        if other is not None:
            out = nearest(out, x.dtype.element_ty) + widen(load_tile(other, row, 0, rows, cols, HIGH, WIDE))
        store_values(dx, out, row, 0, rows, cols)
    if sums is not None:
        store_values(sums, tl.sum(of_weight, 0)[None, :], program, 0, programs, cols)


def norm_gradients(
    x: Tensor, dy: Tensor, weight: Tensor, factor: Tensor, other: Tensor | None, dx: Tensor, sums: Tensor | None,
    programs: int, offset: bool, rounds: bool,
) -> None:  # fmt: skip
    """Write the gradient of a norm's input, and for each program its part of the weight's. All are contiguous; rows
    have no more than ``WIDEST`` columns."""
    (rows, cols), high = x.shape, rows_at_once(x.shape[1])
    wide = triton.next_power_of_2(cols)
    launch(
        _norm_gradients, programs, x, dy, weight, factor, other, dx, sums, rows, cols, float(cols),
        programs, -(-rows // (programs * high)), OFFSET=offset, ROUNDS=rounds, HIGH=high, WIDE=wide,
        num_warps=high * wide // PER_WARP,
    )  # fmt: skip
