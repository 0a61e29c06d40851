"""NVFP4's CUDA kernels: one read for the amaxes of the operands, one more for both operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.formats.elements import E4M3
from lpq.kernels.tiles import (
    LOW,
    SQUARE,
    Shape,
    amax_finish,
    amax_parts,
    at_once,
    broad,
    by_columns,
    covering,
    is_whole,
    pointer,
    reading,
    tile_kernels,
    tiles,
)
from lpq.operations.measuring import measure_reference
from lpq.operations.quantizing import quantize_reference
from lpq_nvfp4 import search
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import GROUP

QUANTIZE = tile_kernels("nvfp4/quantize.cu", "quantize", "PPPPPPPPIPPPIPPPqI")
AMAXES = tile_kernels("nvfp4/amaxes.cu", "amaxes", "PPPPPI")[SQUARE]
AT_ONCE = 4
"""How many blocks of threads a multiprocessor runs, which take several tiles in turn where there are more."""


def why_not(first: NVFP4Quantizer, second: NVFP4Quantizer | None = None) -> str | None:
    """Both operands come from one kernel if their blocks have one shape."""
    if second is not None and first.block != second.block:
        return "serves both operands at once only if their blocks have one shape, else one at a time"
    if second is not None and first.rht:
        return "the row operand of a pair is not rotated"
    return None


def quantize_why_not(first: NVFP4Quantizer, second: NVFP4Quantizer | None = None) -> str | None:
    """The same, and scales are those of amaxes."""
    return search.why_not(*(side for side in (first, second) if side is not None)) or why_not(first, second)


def measure(
    x: Tensor, row: NVFP4Quantizer | None, col: NVFP4Quantizer | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The amaxes of the wanted operands and of their blocks. Of a shared pair only the row's are measured."""
    dtype = dtype or x.dtype
    if x.numel() == 0 or (row is not None and row.rht):
        return measure_reference(x.to(dtype), row, col)
    if row is not None and row == col and row.transposable:
        col = None
    x = x.contiguous()
    rows, cols = x.shape
    of_rows = x.new_empty(_blocks(row, rows, cols), dtype=torch.float32) if row is not None else None
    of_cols = x.new_empty(_blocks(col, cols, rows), dtype=torch.float32) if col is not None else None
    side = row or col
    assert side is not None
    rotated = col is not None and col.rht
    parts = _amaxes(x, dtype, not side.rht, rotated, of_rows, of_cols, square=side.block == "16x16")
    found: list[Tensor] = []
    for of_operand, of_blocks in zip((parts[0], parts[rotated]), (of_rows, of_cols), strict=True):
        if of_operand is not None and of_blocks is not None:
            found += (amax_finish(of_operand), of_blocks)
    return found


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: NVFP4Quantizer | None,
    col: NVFP4Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """As the reference, which is called itself where there is nothing to launch for; where the first row of a shard
    cuts a group of 16 that the random bits of a column operand come in, which no layer asks for; and where the row
    operand is rotated, as that of no quantizer is."""
    dtype = dtype or x.dtype
    cut = col is not None and col.stochastic and offset % GROUP
    if x.numel() == 0 or cut or (row is not None and row.rht):
        return quantize_reference(x.to(dtype), stats, row, col, seed, offset, measure)
    given = [None if stat is None else stat.contiguous() for stat in stats]
    return _run(x.contiguous(), dtype, given, row, col, seed, offset, measure=measure)


def _run(
    x: Tensor,
    dtype: torch.dtype,
    stats: list[Tensor | None],
    row: NVFP4Quantizer | None,
    col: NVFP4Quantizer | None,
    seed: Tensor | None,
    offset: int,
    *,
    measure: bool,
) -> list[Tensor]:
    """Encoded operands, then their statistics, if wanted. Of a shared pair only the row's are measured."""
    shared = row is not None and row == col and row.transposable
    first = (stats[0], stats[1]) if stats else (None, None)
    second = first if row is None or len(stats) < 4 else (stats[2], stats[3])
    unknown = [
        side
        for side, amax in ((row, first[0]), (None if shared else col, second[0]))
        if side and (measure or amax is None)
    ]
    plain, rotated = parts_of(x, dtype, any(not side.rht for side in unknown), any(side.rht for side in unknown))
    out: list[Tensor] = []
    measured: list[Tensor] = []
    pointers: list[int] = []  # for each side: data, scale, amax; for each side: amaxes, their count, given, measured
    amaxes: list[int] = []
    for side, (high, wide), (amax, given) in ((row, x.shape, first), (col, x.shape[::-1], second)):
        if side is None:
            pointers += (0, 0, 0)
            amaxes += (0, 0, 0, 0)
            continue
        parts = rotated if side.rht else plain
        out += fresh(x, side, high, wide)
        pointers += (t.data_ptr() for t in out[-3:])
        wanted = None
        if measure and not (shared and measured):
            assert parts is not None
            wanted = x.new_empty(_blocks(side, high, wide), dtype=torch.float32)
            measured += (amax_finish(parts), wanted)
        known = amax if amax is not None else parts
        assert known is not None
        amaxes += (known.data_ptr(), known.numel(), pointer(given), pointer(wanted))
    rows, cols = x.shape
    by_block = measure or first[1] is not None or second[1] is not None
    macros, shape = _macros(row, col, shared, by_block)
    if col is None and row is not None and row.block == "1x16":
        shape = broad(x, dtype, shape)
    count = tiles(rows, cols, shape)
    together = 128  # rows of tiles that a block of threads takes in turn
    if row is not None and col is not None:
        together = 512 if col.rht else 256
    QUANTIZE[shape].launch(
        x.get_device(), reading(x.dtype, dtype) + macros + covering(shape, is_whole(x, rows, cols, shape)),
        max(-(-count * shape.tall // together), at_once(count, AT_ONCE, x.get_device())),
        x.data_ptr(), *pointers, *amaxes, pointer(seed), offset, count, rows, cols,
    )  # fmt: skip
    return out + measured


def fresh(x: Tensor, side: NVFP4Quantizer, high: int, wide: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for an operand of ``x``: that of ``NVFP4Storage.fresh``, which takes the host nearly twice as long."""
    lines, blocks = _blocks(side, high, wide)
    data = x.new_empty((high, blocks * (GROUP // 2)), dtype=torch.uint8)
    by_rows = side.block == "16x16"
    scale = x.new_empty((lines, blocks), dtype=E4M3) if by_rows else by_columns(x, lines, blocks, E4M3)
    return data, scale, x.new_empty((), dtype=torch.float32)


def _blocks(side: NVFP4Quantizer, high: int, wide: int) -> tuple[int, int]:
    return high if side.block == "1x16" else -(-high // GROUP), -(-wide // GROUP)


def parts_of(x: Tensor, dtype: torch.dtype, plain: bool, rotated: bool) -> tuple[Tensor | None, Tensor | None]:
    """Magnitudes of which the largest is the amax of the matrix, and that of its rotated columns."""
    if rotated:
        return _amaxes(x, dtype, plain, rotated)
    return (amax_parts(x, dtype) if plain else None), None


def _amaxes(
    x: Tensor,
    dtype: torch.dtype,
    plain: bool,
    rotated: bool,
    of_rows: Tensor | None = None,
    of_cols: Tensor | None = None,
    *,
    square: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """The same; and those of the blocks of the operands, to where they are wanted."""
    rows, cols = x.shape
    count = tiles(rows, cols, SQUARE)
    parts = at_once(count, AT_ONCE, x.get_device())
    of_plain = x.new_empty((parts,), dtype=torch.float32) if plain else None
    of_rotated = x.new_empty((parts,), dtype=torch.float32) if rotated else None
    macros = _switches(rotated, square, of_rows is not None or of_cols is not None)
    AMAXES.launch(
        x.get_device(),
        reading(x.dtype, dtype) + covering(SQUARE, is_whole(x, rows, cols, SQUARE)) + macros, parts,
        x.data_ptr(), *map(pointer, (of_plain, of_rotated, of_rows, of_cols)), count, rows, cols,
    )  # fmt: skip
    return of_plain, of_rotated


@cache
def _switches(rotated: bool, square: bool, stats: bool) -> tuple[str, ...]:
    switches = {"LPQ_SQUARE": square, "LPQ_ROTATED": rotated, "LPQ_STATS": stats}
    return tuple(name for name, on in switches.items() if on)


@cache
def _macros(
    row: NVFP4Quantizer | None, col: NVFP4Quantizer | None, shared: bool, stats: bool
) -> tuple[tuple[str, ...], Shape]:
    """What the source is compiled with, and the shape of its tiles."""
    side = row or col
    assert side is not None
    sides = (("LPQ_ROW", row), ("LPQ_COL", col))
    wanted = [f"{name}={2 if side.stochastic else 1}" for name, side in sides if side is not None]
    switches = _switches(col is not None and col.rht, side.block == "16x16", stats)
    return (*wanted, *(["LPQ_SHARED"] if shared else []), *switches), LOW if col is None else SQUARE
