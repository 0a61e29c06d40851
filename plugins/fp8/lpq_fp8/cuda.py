"""FP8's CUDA kernels: both operands from one read of the tensor, after one more where its amax must be known first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.core.operations import measure_reference, quantize_reference
from lpq.ops.tiles import (
    LOW,
    SQUARE,
    TALL,
    UNIT,
    Shape,
    amax_finish,
    amax_parts,
    broad,
    by_columns,
    covering,
    flat,
    is_whole,
    pointer,
    reading,
    tile_kernels,
    tiles,
    zeros,
)
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.storage import ELEMENTS

ONE_SCALE = tile_kernels("fp8/square.cu", "quantize", "PPPPPPIPPfI")
VECTOR = tile_kernels("fp8/vector.cu", "quantize", "PPPPPPPPPfII")
LINES = tile_kernels("fp8/vector.cu", "amax", "PPP")
BLOCKS = tile_kernels("fp8/blocks.cu", "amax", "PPP")
BLOCK = 128


def why_not(first: FP8Quantizer, second: FP8Quantizer | None = None) -> str | None:
    """Both operands come from one kernel if their scales cover the same blocks, or the same whole."""
    if second is None or first == second:
        return None
    if first.transposable or first.scaling != second.scaling or first.scaled_block != second.scaled_block:
        return "serves both operands at once only if their scales cover blocks of one kind, else one at a time"
    return None


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: FP8Quantizer | None,
    col: FP8Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """As the reference."""
    if x.numel() == 0:
        return quantize_reference(x, stats, row, col, seed, offset, measure)
    x = x.contiguous()
    side = row or col
    assert side is not None
    return (_one_scale if side.transposable else _lines)(x, dtype or x.dtype, stats, row, col, measure)


# ---------------------------------------------------------------------------------- the matrix, or 128x128


def _one_scale(
    x: Tensor,
    dtype: torch.dtype,
    stats: Sequence[Tensor | None],
    row: FP8Quantizer | None,
    col: FP8Quantizer | None,
    measure: bool,
) -> list[Tensor]:
    """The bytes of either operand are those of the other."""
    side = row or col
    assert side is not None
    given = stats[0] if stats else None
    square = side.scaling == "block"
    rows, cols = x.shape
    grid = (-(-rows // BLOCK), -(-cols // BLOCK)) if square else ()
    amaxes = given.contiguous() if given is not None else None if square else amax_parts(x, dtype)
    known = measured = None
    if measure and square:
        measured = x.new_empty(grid if row is not None else grid[::-1], dtype=torch.float32)
    elif measure and given is not None:  # a by-product
        (measured,) = zeros(x, ())
    elif measure:
        known = x.new_empty((), dtype=torch.float32)
    count = amaxes.numel() if amaxes is not None else 0
    element = ELEMENTS[side.dtype]
    row_data = row_scale = col_data = col_scale = None
    out: list[Tensor] = []
    if row is not None:
        row_data = x.new_empty((rows, cols), dtype=element)
        row_scale = x.new_empty(grid, dtype=torch.float32)
        out += (row_data, row_scale)
    if col is not None:
        col_data = x.new_empty((cols, rows), dtype=element)
        col_scale = x.new_empty(grid[::-1], dtype=torch.float32)
        out += (col_data, col_scale)
    # A low tile is too small to look for the largest of many parts, or to hold a block.
    shape = TALL if col is not None else SQUARE if square or count > 1 else LOW
    if row is not None:
        shape = broad(x, dtype, shape)
    if col is None and not square and shape.wide == UNIT:
        rows, cols = flat(x)
    macros = _macros(row.dtype if row else None, col.dtype if col else None, square, False)
    ONE_SCALE[shape].launch(
        x.get_device(), reading(x.dtype, dtype) + macros + covering(shape, is_whole(x, rows, cols, shape)),
        tiles(rows, cols, shape), x.data_ptr(),
        pointer(row_data), pointer(row_scale), pointer(col_data), pointer(col_scale), pointer(amaxes), count,
        pointer(known), pointer(measured), side.largest_scale(dtype), side.pow2_scales, rows, cols,
    )  # fmt: skip
    return [*out, *(t for t in (known, measured) if t is not None)]


# ---------------------------------------------------------------------------------- rows, or 1x128


def _lines(
    x: Tensor,
    dtype: torch.dtype,
    stats: Sequence[Tensor | None],
    row: FP8Quantizer | None,
    col: FP8Quantizer | None,
    measure: bool,
) -> list[Tensor]:
    """Each operand has scales of its own."""
    side = row or col
    assert side is not None
    blocks = side.scaling == "block"
    known = [None if s is None else s.contiguous() for s in stats] or [None] * sum(s is not None for s in (row, col))
    measured: list[Tensor] = []
    if not blocks and (measure or None in known):  # a row is longer than a tile: it is measured before
        measured = measure_lines(x, row, col, dtype)
        known = [m if k is None else k for k, m in zip(known, measured, strict=True)]
    rest = iter(known)
    out: list[Tensor] = []
    buffers: list[tuple[Tensor | None, ...]] = []
    rows, cols = x.shape
    for operand, high, wide in ((row, rows, cols), (col, cols, rows)):
        if operand is None:
            buffers.append((None, None, None, None))
            continue
        data = x.new_empty((high, wide), dtype=ELEMENTS[operand.dtype])
        scale, amaxes = scales_of(x, high, wide, blocks), None
        if blocks and measure:
            amaxes = x.new_empty(scale.shape, dtype=torch.float32)
            measured.append(amaxes)
        out += (data, scale)
        buffers.append((data, scale, next(rest), amaxes))
    (rd, rs, rg, rm), (cd, cs, cg, cm) = buffers
    pow2 = blocks and all(q.pow2_scales for q in (row, col) if q is not None)
    shape = _shape(x, dtype, row, col, pow2)
    macros = _macros(row.dtype if row else None, col.dtype if col else None, False, blocks)
    macros += _options(pow2, blocks and any(t is not None for t in (rg, cg, rm, cm)))
    VECTOR[shape].launch(
        x.get_device(), reading(x.dtype, dtype) + macros + covering(shape, is_whole(x, rows, cols, shape)),
        tiles(rows, cols, shape), x.data_ptr(), *map(pointer, (rd, rs, cd, cs, rg, cg, rm, cm)),
        side.largest_scale(dtype), *(q is not None and q.pow2_scales for q in (row, col)), rows, cols,
    )  # fmt: skip
    return out + measured if measure else out


def _shape(x: Tensor, dtype: torch.dtype, row: FP8Quantizer | None, col: FP8Quantizer | None, pow2: bool) -> Shape:
    """Of tiles. Both operands at once need many registers, and more where scales take a division."""
    if col is None:
        return broad(x, dtype, LOW)
    if row is None:
        return TALL
    shape = broad(x, dtype, TALL) if pow2 else TALL
    return SQUARE if shape == TALL else shape


def scales_of(x: Tensor, high: int, wide: int, blocks: bool) -> Tensor:
    """Memory for the scales of the blocks of an operand, or of its rows."""
    if blocks:
        return by_columns(x, high, -(-wide // BLOCK), torch.float32)
    return x.new_empty((high, 1), dtype=torch.float32)


def measure_lines(x: Tensor, row: FP8Quantizer | None, col: FP8Quantizer | None, dtype: torch.dtype) -> list[Tensor]:
    """The amaxes of the rows of the wanted operands."""
    rows, cols = x.shape
    found = zeros(x, *((size, 1) for side, size in ((row, rows), (col, cols)) if side is not None))
    of_rows, of_cols = found[0] if row is not None else None, found[-1] if col is not None else None
    LINES[TALL].launch(
        x.get_device(), reading(x.dtype, dtype) + covering(TALL, is_whole(x, rows, cols, TALL)),
        tiles(rows, cols, TALL), x.data_ptr(), pointer(of_rows), pointer(of_cols), rows, cols,
    )  # fmt: skip
    return found


# ---------------------------------------------------------------------------------- measuring alone


def measure(
    x: Tensor, row: FP8Quantizer | None, col: FP8Quantizer | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The statistics of the wanted operands."""
    if x.numel() == 0:
        return measure_reference(x, row, col)
    x = x.contiguous()
    side = row or col
    assert side is not None
    dtype = dtype or x.dtype
    if side.scaling == "block":
        return _measure_blocks(x, row, col, side.transposable, dtype)
    return [amax_finish(amax_parts(x, dtype))] if side.transposable else measure_lines(x, row, col, dtype)


def _measure_blocks(
    x: Tensor, row: FP8Quantizer | None, col: FP8Quantizer | None, square: bool, dtype: torch.dtype
) -> list[Tensor]:
    """Those of blocks, which a weight that is sharded across them needs. Square ones are measured once for both."""
    rows, cols = x.shape
    sides = ((row, rows, cols), (None if square and row is not None else col, cols, rows))
    found = [
        x.new_empty((-(-high // BLOCK) if square else high, -(-wide // BLOCK)), dtype=torch.float32)
        for side, high, wide in sides
        if side is not None
    ]
    of_rows, of_cols = found[0] if row is not None else None, found[-1] if sides[1][0] is not None else None
    shape = broad(x, dtype, SQUARE)
    BLOCKS[shape].launch(
        x.get_device(),
        reading(x.dtype, dtype) + covering(shape, is_whole(x, rows, cols, shape)) + _macros(None, None, square, False),
        tiles(rows, cols, shape), x.data_ptr(), pointer(of_rows), pointer(of_cols), rows, cols,
    )  # fmt: skip
    return found


# ---------------------------------------------------------------------------------- what the sources take


@cache
def _macros(row: str | None, col: str | None, square: bool, blocks: bool) -> tuple[str, ...]:
    wanted = (("LPQ_ROW", row), ("LPQ_COL", col))
    elements = (f"{name}={element.upper()}" for name, element in wanted if element is not None)
    return *elements, *(["LPQ_SQUARE"] if square else []), *(["LPQ_BLOCKS"] if blocks else [])


@cache
def _options(pow2: bool, stats: bool) -> tuple[str, ...]:
    """Of blocks along the rows: scales are powers of two; amaxes are given or wanted."""
    return *(["LPQ_POW2"] if pow2 else []), *(["LPQ_STATS"] if stats else [])
