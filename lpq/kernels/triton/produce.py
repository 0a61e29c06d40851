"""The kernel that computes the tiles of a source and encodes them, in any format that has a program for its tiles.

It is compiled for the function of a source, and for the functions of each operand's format. No function knows another.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction, driver

from lpq.kernels.triton import launch, programs, sources
from lpq.kernels.triton.numbers import narrow, widen
from lpq.kernels.triton.tiles import load_tile, place_of_tile, store_tile

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
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
def _produce(
    a, b, c, rows, cols, outputs,
    COMPUTE: tl.constexpr, CONSTANT: tl.constexpr, OUTPUTS: tl.constexpr, DTYPE: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``outputs``: of each the memory for the matrix, both sides, a seed, and its first row in the whole tensor."""
    row, col = place_of_tile(cols, HIGH, WIDE)
    inside = (row + tl.arange(0, HIGH)[:, None] < rows) & (col + tl.arange(0, WIDE)[None, :] < cols)
    first = widen(load_tile(a, row, col, rows, cols, HIGH, WIDE))
    second = first
    third = first
    if b is not None:
        second = widen(load_tile(b, row, col, rows, cols, HIGH, WIDE))
    if c is not None:
        third = widen(load_tile(c, row, col, rows, cols, HIGH, WIDE))
    made = COMPUTE(first, second, third, DTYPE, CONSTANT)
    for i in tl.static_range(OUTPUTS):
        tile = narrow(tl.where(inside, made[i], 0.0), DTYPE)
        if outputs[i][0] is not None:
            store_tile(outputs[i][0], tile, row, col, rows, cols)
        # Functions in a tuple are handed on, and cannot be assigned to names.
        _encode(widen(tile), row, col, rows, cols, outputs[i][1], outputs[i][3], outputs[i][4])
        _encode(widen(tl.trans(tile)), col, row, cols, rows, outputs[i][2], outputs[i][3], outputs[i][4])


def constant(options: tuple[object, ...]) -> Any:
    """The options of a format as one constant among the arguments of a kernel."""
    return tl.constexpr(options)


def produce(
    program: tuple[str, str], matrices: Sequence[Tensor], outputs: Sequence[tuple[Any, ...]], tile: tuple[int, int]
) -> None:
    """Run a program for each tile of what a source computes of these contiguous matrices, which are not empty."""
    high, wide = tile
    (rows, cols), name = matrices[0].shape, program[1]
    first, *rest = matrices
    launch(
        _produce, programs((rows, cols), high, wide), first, *[*rest, None, None][:2], rows, cols, tuple(outputs),
        COMPUTE=getattr(sources, program[0]), CONSTANT=getattr(sources, name), OUTPUTS=len(outputs),
        DTYPE=DTYPES[matrices[0].dtype], HIGH=high, WIDE=wide,
        num_warps=min(max(high * wide // PER_WARP, 1), WARPS), **_keeping_small_numbers(),
    )  # fmt: skip


def _keeping_small_numbers() -> dict[str, bool]:
    """The option by which libdevice keeps numbers below the normal ones, as it does in torch's kernels. Triton has it
    for NVIDIA's GPUs; on AMD's they are kept anyway."""
    compiled = isinstance(_produce, JITFunction)
    return {"enable_reflect_ftz": False} if compiled and driver.active.get_current_target().backend == "cuda" else {}
