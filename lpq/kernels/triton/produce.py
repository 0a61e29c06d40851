"""The kernel that computes the tiles of a source and encodes them, in any format that has a program for its tiles.

It is compiled for the function of a source, and for the functions of each operand's format. No function knows another.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpq.kernels.triton import keeping_small_numbers, launch, programs, sources
from lpq.kernels.triton.numbers import narrow, widen
from lpq.kernels.triton.tiles import load_tile, place_of_tile, store_tile

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
PER_WARP = 1024
"""The elements of a tile that a warp takes, if it need not take more."""
WARPS = 16
"""The most warps of a program: 1024 threads on AMD's GPUs."""


@triton.jit
def _encode(x, row, col, rows, cols, side, seed, offset):
    """Measure and write a tile of one operand, as far as that is wanted. ``side``: the functions of its format and
    their options, then what they are given."""
    if side[1] is not None:
        side[1](x, row, col, rows, cols, side[5], side[2])
    if side[0] is not None:
        side[0](x, row, col, rows, cols, side[3], side[4], seed, offset, side[2])


@triton.jit
def _numbers(x, first, count, SIZE: tl.constexpr):
    """The numbers of a tile's rows or columns in fp32; zeros of a vector that is not there."""
    values = tl.zeros((SIZE,), tl.float32)
    if x is not None:
        at = first + tl.arange(0, SIZE)
        values = widen(tl.load(x + at, mask=at < count, other=0))
    return values


@triton.jit
def _produce(
    a, others, of_row, of_col, rows, cols, outputs,
    COMPUTE: tl.constexpr, CONSTANT: tl.constexpr, OUTPUTS: tl.constexpr, DTYPE: tl.constexpr,
    HALVES: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``others``: two more matrices; ``of_row`` and ``of_col``: two vectors each, with a number for each row or column.
    None stands for each that the source does not have. ``outputs``: of each the memory for the matrix, both sides, a
    seed, and its first row in the whole tensor. ``DTYPE``: the dtype of matrices. ``HALVES``: the first two
    matrices are halves of one that is twice as wide, and so are the outputs before the last."""
    row, col = place_of_tile(cols, HIGH, WIDE)
    inside = (row + tl.arange(0, HIGH)[:, None] < rows) & (col + tl.arange(0, WIDE)[None, :] < cols)
    apart = 2 * cols if HALVES else cols
    first = widen(load_tile(a, row, col, rows, cols, HIGH, WIDE, apart))
    second = first
    third = first
    if others[0] is not None:
        second = widen(load_tile(others[0], row, col, rows, cols, HIGH, WIDE, apart))
    if others[1] is not None:
        third = widen(load_tile(others[1], row, col, rows, cols, HIGH, WIDE))
    by_row = _numbers(of_row[0], row, rows, HIGH)[:, None], _numbers(of_row[1], row, rows, HIGH)[:, None]
    by_col = _numbers(of_col[0], col, cols, WIDE)[None, :], _numbers(of_col[1], col, cols, WIDE)[None, :]
    made = COMPUTE((first, second, third), by_row, by_col, DTYPE, CONSTANT)
    for i in tl.static_range(OUTPUTS):
        tile = narrow(tl.where(inside, made[i], 0.0), DTYPE)
        if outputs[i][0] is not None:
            store_tile(outputs[i][0], tile, row, col, rows, cols, apart if i < OUTPUTS - 1 else cols)
        # Functions in a tuple are handed on, and cannot be assigned to names.
        _encode(widen(tile), row, col, rows, cols, outputs[i][1], outputs[i][3], outputs[i][4])
        _encode(widen(tl.trans(tile)), col, row, cols, rows, outputs[i][2], outputs[i][3], outputs[i][4])


class SourceInputs(NamedTuple):
    """The tensors of which a source computes."""

    matrices: Sequence[Tensor]
    of_row: Sequence[Tensor]
    """A number for each row, in fp32."""
    of_col: Sequence[Tensor]
    """A number for each column."""


def _two(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Up to two tensors, and None in place of the others."""
    return tuple([*tensors, None, None][:2])


def constant(options: tuple[object, ...]) -> Any:
    """The options of a format as one constant among the arguments of a kernel."""
    return tl.constexpr(options)


def produce(
    program: tuple[str, Any], inputs: SourceInputs, outputs: Sequence[tuple[Any, ...]], tile: tuple[int, int],
    halves: bool = False,
) -> None:  # fmt: skip
    """Run a program for each tile of what a source computes of these contiguous tensors, which are not empty.
    ``halves``: the first two are halves of one matrix, and so are the outputs before the last."""
    (high, wide), (function, given) = tile, program
    first, *others = inputs.matrices
    rows, cols = first.shape
    launch(
        _produce, programs((rows, cols), high, wide), first, *map(_two, (others, inputs.of_row, inputs.of_col)),
        rows, cols, tuple(outputs),
        COMPUTE=getattr(sources, function), CONSTANT=getattr(sources, given) if isinstance(given, str) else given,
        OUTPUTS=len(outputs), DTYPE=DTYPES[first.dtype], HALVES=halves, HIGH=high, WIDE=wide,
        num_warps=min(max(high * wide // PER_WARP, 1), WARPS), **keeping_small_numbers(_produce),
    )  # fmt: skip
