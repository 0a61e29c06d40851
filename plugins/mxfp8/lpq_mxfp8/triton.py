"""MXFP8's Triton kernels: both operands from one read of the tensor."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpq.formats.format import Direction
from lpq.kernels.triton import block_amaxes, empty_amaxes, launch, programs
from lpq.kernels.triton.kernels import as_bits
from lpq.kernels.triton.numbers import cast_e8m0, cast_float8, decode_e8m0, decode_float8, inverse_e8m0, widen
from lpq.kernels.triton.tiles import (
    block_amax,
    block_grid,
    known_amax,
    load_tile,
    measure_tile,
    place_of_tile,
    spread,
    store_amax,
    store_tile,
    store_values,
)
from lpq.operations.decoding import decode_reference
from lpq.operations.inputs import DTYPES
from lpq.operations.measuring import measure_reference
from lpq.operations.references import quantize_reference
from lpq.operations.stored_tile import StoredTile
from lpq.operations.tile_program import TileProgram
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.reference import BLOCK
from lpq_mxfp8.storage import MXFP8Storage

WIDTH = tl.constexpr(32)
TILE = 64


@triton.jit
def _encode(
    x, row, col, rows, cols, data, scale, given, measured, E5M2: tl.constexpr, COLUMN_MAJOR: tl.constexpr = True
):  # fmt: skip
    """A tile of one operand. Its blocks' amaxes are given, or the tile's."""
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    places, inside = block_grid(row, col, rows, cols, high, wide // WIDTH, 1, WIDTH)
    own = block_amax(x, high, wide // WIDTH)
    if measured is not None:
        store_amax(measured, own, places, inside, 1, WIDTH)
    exponent = cast_e8m0(known_amax(given, own, places, inside) * (1.0 / (57344.0 if E5M2 else 448.0)))
    to, _ = block_grid(row, col, rows, cols, high, wide // WIDTH, 1, WIDTH, COLUMN_MAJOR)
    tl.store(scale + to, exponent.to(tl.uint8), mask=inside)
    values = x * spread(inverse_e8m0(exponent), high, wide)
    store_tile(data, cast_float8(values, values, E5M2), row, col, rows, cols)


# Statistics may be views of what ranks reduced: one program for them wherever they lie.
@triton.jit(do_not_specialize_on_alignment=["row_given", "col_given"])
def _quantize(
    x, row_data, row_scale, row_given, row_measured, col_data, col_scale, col_given, col_measured, rows, cols,
    ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, col = place_of_tile(cols, TILE, TILE)
    values = load_tile(x, row, col, rows, cols, TILE, TILE)
    if row_data is not None:
        _encode(widen(values), row, col, rows, cols, row_data, row_scale, row_given, row_measured, ROW_E5M2)
    if col_data is not None:
        _encode(widen(tl.trans(values)), col, row, cols, rows, col_data, col_scale, col_given, col_measured, COL_E5M2)


def measure(x: Tensor, row: MXFP8Quantizer | None, col: MXFP8Quantizer | None) -> list[Tensor]:
    """The amaxes of the blocks of the wanted operands."""
    if x.numel() == 0:
        return measure_reference(x, row, col)
    return block_amaxes(x.contiguous(), BLOCK if row is not None else None, BLOCK if col is not None else None)


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: MXFP8Quantizer | None,
    col: MXFP8Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> list[Tensor]:
    """Encode as the reference does."""
    if x.numel() == 0:
        return quantize_reference(x, stats, row, col, seed, offset, measure)
    x = x.contiguous()
    rows, cols = x.shape
    given = iter(stats)
    out: list[Tensor] = []
    measured: list[Tensor] = []
    buffers: list[Tensor | None] = []
    for side, grid in ((row, (rows, cols)), (col, (cols, rows))):
        if side is None:
            buffers += [None] * 4
            continue
        operand = MXFP8Storage.fresh(side, grid, x)
        out += operand.tensors()
        amax = next(given, None)
        own = empty_amaxes(x, *grid, BLOCK) if measure else None
        measured += [own] if own is not None else []
        buffers += [operand.data.view(torch.uint8), operand.scale]
        buffers += [amax.contiguous() if amax is not None else None, as_bits(own)]
    tile, warps = (32, 1) if row is not None and col is not None else (TILE, 2)
    launch(
        _quantize, programs(x.shape, tile, tile), x, *buffers, rows, cols,
        ROW_E5M2=_e5m2(row), COL_E5M2=_e5m2(col), TILE=tile, num_warps=warps,
    )  # fmt: skip
    return out + measured


def _e5m2(side: MXFP8Quantizer | None) -> bool:
    return side is not None and side.dtype == "e5m2"


@triton.jit
def _values(
    data, scale, row, col, rows, cols, E5M2: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr = False,
):  # fmt: skip
    """A tile of an operand, decoded."""
    values = decode_float8(load_tile(data, row, col, rows, cols, HIGH, WIDE), E5M2)
    places, inside = block_grid(row, col, rows, cols, HIGH, WIDE // WIDTH, 1, WIDTH, COLUMN_MAJOR)
    factor = decode_e8m0(tl.load(scale + places, mask=inside, other=0).to(tl.int32))
    return values * spread(factor, HIGH, WIDE)


@triton.jit
def _decode(data, scale, out, rows, cols, E5M2: tl.constexpr, TILE: tl.constexpr):
    row, col = place_of_tile(cols, TILE, TILE)
    store_values(out, _values(data, scale, row, col, rows, cols, E5M2, TILE, TILE, True), row, col, rows, cols)


@triton.jit
def _store(x, data, scale, row, col, rows, cols, E5M2: tl.constexpr):
    _encode(x, row, col, rows, cols, data, scale, None, None, E5M2, False)


def stored_tile(quantizer: MXFP8Quantizer) -> StoredTile:
    """The functions for a tile of a row operand that is kept."""
    return StoredTile(_values, _store, int(_e5m2(quantizer)), BLOCK[1])


@triton.jit
def _write(x, row, col, rows, cols, buffers, stats, seed, offset, OPTIONS: tl.constexpr):
    _encode(x, row, col, rows, cols, buffers[0], buffers[1], stats[0], None, OPTIONS[0])


@triton.jit
def _measure(x, row, col, rows, cols, measured, OPTIONS: tl.constexpr):
    measure_tile(x, row, col, rows, cols, measured[0], 1, WIDTH)


def tile_program(quantizer: MXFP8Quantizer, direction: Direction, dtype: torch.dtype) -> TileProgram:
    """The functions for a tile of either operand."""
    return TileProgram(_write, _measure, (_e5m2(quantizer),), before=(False,), block=(1, BLOCK[1]))


def decode(operand: MXFP8Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    rows, cols = operand.shape
    if dtype not in DTYPES or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale = (buffer.laid(t) for buffer, t in zip(operand.quantizer.layout, operand.tensors(), strict=True))
    out = data.new_empty((rows, cols), dtype=dtype)
    launch(
        _decode, programs((rows, cols), TILE, TILE), data.view(torch.uint8), scale, out, rows, cols,
        E5M2=_e5m2(operand.quantizer), TILE=TILE, num_warps=2,
    )  # fmt: skip
    return out
