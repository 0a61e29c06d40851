"""Triton kernels that belong to no format, and how kernels are launched."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction, driver

from lpq.kernels.triton.numbers import pack_nibbles, unpack_nibbles, widen
from lpq.kernels.triton.tiles import load_tile, measure_tile, place_of_tile, store_tile

Block = tuple[int | None, int | None]
TILE = 128


def programs(shape: torch.Size | tuple[int, int], high: int, wide: int) -> int:
    """How many tiles cover a matrix: the programs of a kernel that takes a tile each."""
    rows, cols = shape
    return -(-rows // high) * -(-cols // wide)


def launch(kernel: Any, count: int, x: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run ``count`` programs on the device of ``x``, the kernel's first argument. No product is fused with a sum."""
    with torch.cuda.device_of(x):
        kernel[(count,)](x, *arguments, enable_fp_fusion=False, **constants)


def keeping_small_numbers(kernel: Any) -> dict[str, bool]:
    """The option by which libdevice keeps numbers below the normal ones, as it does in torch's kernels. Triton has it
    for NVIDIA's GPUs; on AMD's they are kept anyway."""
    compiled = isinstance(kernel, JITFunction)
    return {"enable_reflect_ftz": False} if compiled and driver.active.get_current_target().backend == "cuda" else {}


# ---------------------------------------------------------------------------------------------- amaxes


@triton.jit
def _measure(
    x, row_out, col_out, rows, cols,
    ROW_HIGH: tl.constexpr, ROW_WIDE: tl.constexpr, COL_HIGH: tl.constexpr, COL_WIDE: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, col = place_of_tile(cols, HIGH, WIDE)
    values = load_tile(x, row, col, rows, cols, HIGH, WIDE)
    if row_out is not None:
        measure_tile(widen(values), row, col, rows, cols, row_out, ROW_HIGH, ROW_WIDE)
    if col_out is not None:
        measure_tile(widen(tl.trans(values)), col, row, cols, rows, col_out, COL_HIGH, COL_WIDE)


def block_amaxes(x: Tensor, row: Block | None, col: Block | None) -> list[Tensor]:
    """The largest magnitude of each block of a matrix and of each block of its transpose, of those that are wanted."""
    rows, cols = x.shape
    of_row = empty_amaxes(x, rows, cols, row) if row is not None else None
    of_col = empty_amaxes(x, cols, rows, col) if col is not None else None
    launch(
        _measure, programs(x.shape, TILE, TILE), x, as_bits(of_row), as_bits(of_col), rows, cols,
        **sizes("ROW", row), **sizes("COL", col), HIGH=TILE, WIDE=TILE, num_warps=8,
    )  # fmt: skip
    return [amaxes for amaxes in (of_row, of_col) if amaxes is not None]


def empty_amaxes(x: Tensor, rows: int, cols: int, block: Block) -> Tensor:
    """Memory for the amax of each block; zeros where tiles are to agree on the largest."""
    high, wide = block
    if high is None and wide is None:
        return x.new_zeros((), dtype=torch.float32)
    shape = -(-rows // (high or rows)), -(-cols // (wide or cols))
    make = x.new_empty if high and wide else x.new_zeros
    return make(shape, dtype=torch.float32)


def as_bits(tensor: Tensor | None) -> Tensor | None:
    """Magnitudes as the integers that order as they do."""
    return tensor.view(torch.int32) if tensor is not None else None


def sizes(side: str, block: Block | None) -> dict[str, int]:
    """A block as constants of a kernel; 0 is the whole dimension."""
    high, wide = block or (1, 1)
    return {f"{side}_HIGH": high or 0, f"{side}_WIDE": wide or 0}


# ---------------------------------------------------------------------------------------------- transposes


@triton.jit
def _transpose(x, out, rows, cols, HIGH: tl.constexpr, WIDE: tl.constexpr):
    row, col = place_of_tile(cols, HIGH, WIDE)
    store_tile(out, tl.trans(load_tile(x, row, col, rows, cols, HIGH, WIDE)), col, row, cols, rows)


def transpose_bytes(x: Tensor) -> Tensor:
    """The transpose of a matrix of 1-byte elements."""
    x = x.contiguous()
    rows, cols = x.shape
    out = x.new_empty((cols, rows))
    launch(
        _transpose, programs(x.shape, TILE, TILE), x.view(torch.uint8), out.view(torch.uint8), rows, cols,
        HIGH=TILE, WIDE=TILE, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _transpose_nibbles(x, out, rows, cols, x_bytes, out_bytes, HIGH: tl.constexpr, WIDE: tl.constexpr):
    row, col = place_of_tile(cols, HIGH, WIDE)
    codes = unpack_nibbles(load_tile(x, row, col // 2, rows, x_bytes, HIGH, WIDE // 2)).to(tl.uint8)
    store_tile(out, pack_nibbles(tl.trans(codes)), col, row // 2, cols, out_bytes)


def transpose_nibbles(x: Tensor, rows: int, cols: int, pad: int) -> Tensor:
    """The transpose of a matrix of 4-bit elements, two in a byte, whose rows are padded with zeros to whole ``pad``."""
    x = x.contiguous()
    out = x.new_empty((cols, -(-rows // pad) * pad // 2))
    launch(
        _transpose_nibbles, programs((rows, cols), TILE, TILE), x, out, rows, cols, x.shape[1], out.shape[1],
        HIGH=TILE, WIDE=TILE, num_warps=8,
    )  # fmt: skip
    return out
