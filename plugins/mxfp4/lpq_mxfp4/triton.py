"""MXFP4's Triton kernels: both operands from one read of the tensor."""
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
from lpq.kernels.triton.numbers import (
    INF,
    cast_e2m1,
    cast_e2m1_stochastic,
    decode_e2m1,
    decode_e8m0,
    inverse_e8m0,
    pack_nibbles,
    size_of,
    unpack_nibbles,
    widen,
)
from lpq.kernels.triton.random_bits import random_bytes
from lpq.kernels.triton.rotation import WIDTH as ROTATED
from lpq.kernels.triton.rotation import rotate, unrotate
from lpq.kernels.triton.tiles import (
    block_amax,
    block_grid,
    known_amax,
    load_tile,
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
from lpq.operations.tile_program import TileProgram
from lpq_mxfp4.quantizer import MXFP4Quantizer
from lpq_mxfp4.reference import BLOCK, GROUP, RULES
from lpq_mxfp4.storage import MXFP4Storage

WIDTH = tl.constexpr(GROUP)
TILE, ENCODED = 64, 32


@triton.jit
def _encode(
    x, row, col, rows, cols, data, scale, given, measured, seed, offset_row, offset_col,
    DIRECTION: tl.constexpr, RULE: tl.constexpr, TURNED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """A tile of one operand. Its blocks' amaxes are given, or the tile's. Without ``data`` it is measured alone."""
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    if TURNED:
        x = rotate(x)
    places, inside = block_grid(row, col, rows, cols, high, wide // WIDTH, 1, WIDTH)
    own = block_amax(x, high, wide // WIDTH)
    if measured is not None:
        store_amax(measured, own, places, inside, 1, WIDTH)
    if data is not None:
        bits = size_of(known_amax(given, own, places, inside))
        exponent = tl.where(bits >= INF, 255, tl.maximum((bits + RULE) >> 23, 2) - 2)
        to, _ = block_grid(row, col, rows, cols, high, wide // WIDTH, 1, WIDTH, True)
        tl.store(scale + to, exponent.to(tl.uint8), mask=inside)
        values = x * spread(inverse_e8m0(exponent), high, wide)
        if STOCHASTIC:
            group = (col + offset_col) // 16
            codes = cast_e2m1_stochastic(
                values, random_bytes(seed, row + offset_row, group, DIRECTION, high, wide // 16)
            )
        else:
            codes = cast_e2m1(values)
        stored = cols
        if TURNED:  # what pads the columns was rotated with them
            stored = ((cols - 1) // ROTATED + 1) * ROTATED
        codes = tl.where((col + tl.arange(0, wide) < stored)[None, :], codes, 0)
        packed = ((cols - 1) // WIDTH + 1) * (WIDTH // 2)
        store_tile(data, pack_nibbles(codes), row, col // 2, rows, packed)


# Statistics may be views of what ranks reduced: one program for them wherever they lie.
@triton.jit(do_not_specialize_on_alignment=["row_given", "col_given"])
def _quantize(
    x, row_data, row_scale, row_given, row_measured, col_data, col_scale, col_given, col_measured, seed, offset,
    rows, cols,
    ROW: tl.constexpr, ROW_RULE: tl.constexpr, ROW_TURNED: tl.constexpr, ROW_STOCHASTIC: tl.constexpr,
    COL: tl.constexpr, COL_RULE: tl.constexpr, COL_TURNED: tl.constexpr, COL_STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row, col = place_of_tile(cols, TILE, TILE)
    values = load_tile(x, row, col, rows, cols, TILE, TILE)
    if ROW:
        _encode(widen(values), row, col, rows, cols, row_data, row_scale, row_given, row_measured, seed, offset, 0,
                0, ROW_RULE, ROW_TURNED, ROW_STOCHASTIC)  # fmt: skip
    if COL:
        _encode(widen(tl.trans(values)), col, row, cols, rows, col_data, col_scale, col_given, col_measured, seed, 0,
                offset, 1, COL_RULE, COL_TURNED, COL_STOCHASTIC)  # fmt: skip


def measure(x: Tensor, row: MXFP4Quantizer | None, col: MXFP4Quantizer | None) -> list[Tensor]:
    """The amaxes of the blocks of the wanted operands."""
    if x.numel() == 0:
        return measure_reference(x, row, col)
    x = x.contiguous()
    if not (_turned(row) or _turned(col)):
        return block_amaxes(x, BLOCK if row is not None else None, BLOCK if col is not None else None)
    rows, cols = x.shape
    sides = ((row, (rows, cols)), (col, (cols, rows)))
    measured = [empty_amaxes(x, *grid, BLOCK) for side, grid in sides if side is not None]
    found = iter(measured)
    buffers = [None if side is None else as_bits(next(found)) for side, _ in sides]
    _launch(x, [None, None, None, buffers[0], None, None, None, buffers[1]], row, col, None, 0)
    return measured


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: MXFP4Quantizer | None,
    col: MXFP4Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> list[Tensor]:
    """Encode as the reference does. The reference itself is called for an empty matrix, and where the first row of a
    shard cuts a group of 16 rows that share random bits of the column operand, which happens in no layer."""
    if x.numel() == 0 or (_stochastic(col, seed) and offset % 16):
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
        operand = MXFP4Storage.fresh(side, grid, x)
        out += operand.tensors()
        amax = next(given, None)
        own = empty_amaxes(x, *grid, BLOCK) if measure else None
        measured += [own] if own is not None else []
        buffers += [operand.data, operand.scale, amax.contiguous() if amax is not None else None, as_bits(own)]
    _launch(x, buffers, row, col, seed, offset)
    return out + measured


def _launch(
    x: Tensor,
    buffers: Sequence[Tensor | None],
    row: MXFP4Quantizer | None,
    col: MXFP4Quantizer | None,
    seed: Tensor | None,
    offset: int,
) -> None:
    rows, cols = x.shape
    launch(
        _quantize, programs(x.shape, ENCODED, ENCODED), x, *buffers, seed, offset, rows, cols,
        ROW=row is not None, ROW_RULE=_rule(row), ROW_TURNED=_turned(row), ROW_STOCHASTIC=_stochastic(row, seed),
        COL=col is not None, COL_RULE=_rule(col), COL_TURNED=_turned(col), COL_STOCHASTIC=_stochastic(col, seed),
        TILE=ENCODED, num_warps=1,
    )  # fmt: skip


@triton.jit
def _write(x, row, col, rows, cols, buffers, stats, seed, offset, OPTIONS: tl.constexpr):
    STOCHASTIC: tl.constexpr = OPTIONS[3] if seed is not None else False
    _encode(x, row, col, rows, cols, buffers[0], buffers[1], stats[0], None, seed, 0 if OPTIONS[0] else offset,
            offset if OPTIONS[0] else 0, 1 if OPTIONS[0] else 0, OPTIONS[1], OPTIONS[2], STOCHASTIC)  # fmt: skip


@triton.jit
def _measure(x, row, col, rows, cols, measured, OPTIONS: tl.constexpr):
    _encode(x, row, col, rows, cols, None, None, None, measured[0], None, 0, 0, 0, 0, OPTIONS[2], False)


def tile_program(quantizer: MXFP4Quantizer, direction: Direction, dtype: torch.dtype) -> TileProgram:
    """The functions for a tile of either operand."""
    col = direction == "col"
    options = col, _rule(quantizer), _turned(quantizer), quantizer.stochastic
    aligned = 16 if col and quantizer.stochastic else 1  # rows that share random bits
    return TileProgram(_write, _measure, options, before=(False,), block=(1, BLOCK[1]), aligned=aligned)


def _rule(side: MXFP4Quantizer | None) -> int:
    return 0 if side is None else RULES[side.scale]


def _turned(side: MXFP4Quantizer | None) -> bool:
    return side is not None and side.rht


def _stochastic(side: MXFP4Quantizer | None, seed: Tensor | None) -> bool:
    return side is not None and side.stochastic and seed is not None


@triton.jit
def _decode(data, scale, out, rows, cols, TURNED: tl.constexpr, TILE: tl.constexpr):
    row, col = place_of_tile(cols, TILE, TILE)
    packed = ((cols - 1) // WIDTH + 1) * (WIDTH // 2)
    values = decode_e2m1(unpack_nibbles(load_tile(data, row, col // 2, rows, packed, TILE, TILE // 2)))
    places, inside = block_grid(row, col, rows, cols, TILE, TILE // WIDTH, 1, WIDTH, True)
    factor = decode_e8m0(tl.load(scale + places, mask=inside, other=0).to(tl.int32))
    values = values * spread(factor, TILE, TILE)
    if TURNED:
        values = unrotate(values)
    store_values(out, values, row, col, rows, cols)


def decode(operand: MXFP4Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    rows, cols = operand.shape
    if dtype not in DTYPES or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale = (buffer.laid(t) for buffer, t in zip(operand.quantizer.layout, operand.tensors(), strict=True))
    out = data.new_empty((rows, cols), dtype=dtype)
    launch(
        _decode, programs((rows, cols), TILE, TILE), data, scale, out, rows, cols, TURNED=operand.quantizer.rht,
        TILE=TILE, num_warps=2,
    )  # fmt: skip
    return out
