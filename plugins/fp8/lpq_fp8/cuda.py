"""FP8's CUDA kernels: both operands from one read of the tensor, after one more where its amax must be known first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.kernels.fresh import Fresh, allocator, fresh, fresh_by_columns
from lpq.kernels.tiles import (
    LOW,
    SQUARE,
    TALL,
    UNIT,
    ZERO,
    Shape,
    amax_finish,
    amax_parts,
    bind_amax_parts,
    broad,
    broadened,
    covering,
    divides,
    is_whole,
    pointer,
    reading,
    tile_kernels,
    tiles,
)
from lpq.operations.binding import Encode, Encoded, Encoding, cached_by_shape
from lpq.operations.line_amaxes import bind_amaxes_of_lines, measure_lines
from lpq.operations.measuring import measure_reference
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.reference import ELEMENTS

ONE_SCALE = tile_kernels("fp8/square.cu", "quantize", "PPPPPPIPPfI")
VECTOR = tile_kernels("fp8/vector.cu", "quantize", "PPPPPPPPPfII")
BLOCKS = tile_kernels("fp8/blocks.cu", "amax", "PPP")
BLOCK, FILLED = 128, 4


def why_not(first: FP8Quantizer, second: FP8Quantizer | None = None) -> str | None:
    """Both operands come from one kernel if their scales cover the same blocks, or the same whole."""
    if second is None or first == second:
        return None
    if first.transposable or first.scaling != second.scaling or first.scaled_block != second.scaled_block:
        return "serves both operands at once only if their scales cover blocks of one kind, else one at a time"
    return None


def bind(e: Encoding) -> Encode:
    """How matrices of one shape are encoded."""
    side: FP8Quantizer = e.row or e.col
    return (_one_scale if side.transposable else _lines)(e, side)


quantize = cached_by_shape(bind)


# ---------------------------------------------------------------------------------- the matrix, or 128x128


def _one_scale(e: Encoding, side: FP8Quantizer) -> Encode:
    """Bind an encoding in which both operands have the same bytes."""
    rows, cols = e.shape
    square, given = side.scaling == "block", True in e.given
    grid: tuple[int, ...] = (-(-rows // BLOCK), -(-cols // BLOCK)) if square else ()
    index, empty, element = e.device.index or 0, allocator(e.device, dispatched=e.dispatched), ELEMENTS[side.dtype]
    parts_of_amax = None if square or given else bind_amax_parts(e.held, e.dtype, rows * cols, e.device)
    count = math.prod(grid) if given else parts_of_amax[0][0][0] if parts_of_amax is not None else 0
    by_product, amax = e.measure and not square and given, fresh((), torch.float32)
    zero = ZERO.bind(index, (), 1) if by_product else None
    blocks = fresh(grid if e.row is not None else grid[::-1], torch.float32) if e.measure and square else None
    row, row_scale = fresh((rows, cols), element), fresh(grid, torch.float32)
    col, col_scale = fresh((cols, rows), element), fresh(grid[::-1], torch.float32)
    fills = square and not e.apart and any(blocks % FILLED for blocks in grid)  # as products read them
    if fills:
        row_scale, col_scale = filled(*grid), filled(*grid[::-1])
    # One value serves both operands, unless they lie apart.
    scale_of_both = not (square or e.apart)
    # A low tile is too small to find the largest of many parts, or to hold a block.
    shape = TALL if e.col is not None else SQUARE if square or count > 1 else LOW
    if e.row is not None and e.aligned and e.held is e.dtype:
        shape = broadened(rows, cols, e.held, shape)
    high, wide = rows, cols
    if e.col is None and not square and shape.wide == UNIT and cols % UNIT == 0:
        high, wide = rows * cols // UNIT, UNIT  # rows of one tile, which is then read and written in one piece
    macros = _macros(e.row.dtype if e.row else None, e.col.dtype if e.col else None, square, False)
    macros += ("LPQ_FILLED",) if fills else ()
    launch = ONE_SCALE[shape].bind(
        index, reading(e.held, e.dtype) + macros + covering(shape, e.aligned and divides(high, wide, shape)),
        tiles(high, wide, shape),
    )  # fmt: skip
    tail = side.largest_scale(e.dtype), side.pow2_scales, high, wide
    has_row, has_col = e.row is not None, e.col is not None

    def encode(x: Tensor, at: int, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        of_row: tuple[Tensor, ...] = ()
        of_col: tuple[Tensor, ...] = ()
        measured: tuple[Tensor, ...] = ()
        amaxes = known = found = rd = rs = cd = cs = 0
        if parts_of_amax is not None:
            parts = empty(*parts_of_amax[0])
            amaxes = parts.data_ptr()
            parts_of_amax[1](at, amaxes)
        elif given:
            amaxes = stats[0].data_ptr()  # type: ignore[union-attr]
        if blocks is not None:
            measured = (empty(*blocks),)
            found = measured[0].data_ptr()
        elif zero is not None:
            measured = (empty(*amax),)
            found = measured[0].data_ptr()
            zero(found, 1, found, 1)
        elif e.measure:
            measured = (empty(*amax),)
            known = measured[0].data_ptr()
        if has_row:
            of_row = empty(*row), empty(*row_scale)
            rd, rs = of_row[0].data_ptr(), of_row[1].data_ptr()
        if has_col:
            of_col = empty(*col), of_row[1] if scale_of_both and has_row else empty(*col_scale)
            cd, cs = of_col[0].data_ptr(), of_col[1].data_ptr()
        launch(at, rd, rs, cd, cs, amaxes, count, known, found, *tail)
        return of_row, of_col, measured

    return encode


def filled(lines: int, blocks: int) -> Fresh:
    """Memory for scales of 128x128; each of its lines is filled up to a multiple of 4 with values that nobody reads."""
    return (lines, blocks), (-(-blocks // FILLED) * FILLED, 1), torch.float32


# ---------------------------------------------------------------------------------- rows, or 1x128


def _lines(e: Encoding, side: FP8Quantizer) -> Encode:
    """Each operand has scales of its own."""
    rows, cols = e.shape
    index, empty, blocks = e.device.index or 0, allocator(e.device, dispatched=e.dispatched), side.scaling == "block"
    wanted = [
        (quantizer, high, wide)
        for quantizer, high, wide in ((e.row, rows, cols), (e.col, cols, rows))
        if quantizer is not None
    ]
    given = e.given or (False,) * len(wanted)
    # A row is longer than a tile: it is measured before.
    find = bind_amaxes_of_lines(e) if not blocks and (e.measure or False in given) else None
    data = [fresh((high, wide), ELEMENTS[quantizer.dtype]) for quantizer, high, wide in wanted]
    scales = [fresh_scales(high, wide, blocks) for _, high, wide in wanted]
    amaxes = [fresh(scale[0], torch.float32) for scale in scales] if blocks and e.measure else []
    pow2 = blocks and all(quantizer.pow2_scales for quantizer, *_ in wanted)
    shape = _shape(e, pow2)
    macros = _macros(e.row.dtype if e.row else None, e.col.dtype if e.col else None, False, blocks)
    macros += _options(pow2, blocks and (e.measure or True in given))
    launch = VECTOR[shape].bind(
        index, reading(e.held, e.dtype) + macros + covering(shape, e.aligned and divides(rows, cols, shape)),
        tiles(rows, cols, shape),
    )  # fmt: skip
    flags = (q is not None and q.pow2_scales for q in (e.row, e.col))
    tail = side.largest_scale(e.dtype), *flags, rows, cols
    has_row, has_col = e.row is not None, e.col is not None
    none = (0, 0), (0, 0)

    def encode(x: Tensor, at: int, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        measured: list[Tensor] = find(at) if find is not None else []
        made = [(empty(*d), empty(*s)) for d, s in zip(data, scales, strict=True)]
        known = [(stats[i] if g else measured[i] if find is not None else None) for i, g in enumerate(given)]
        if amaxes:
            measured = [empty(*a) for a in amaxes]
        to = [(d.data_ptr(), s.data_ptr()) for d, s in made]
        read = [
            (k.data_ptr() if k is not None else 0, measured[i].data_ptr() if amaxes else 0) for i, k in enumerate(known)
        ]
        if not has_row:
            to, read = [none[0], *to], [none[0], *read]
        elif not has_col:
            to, read = [*to, none[0]], [*read, none[0]]
        launch(at, *to[0], *to[1], read[0][0], read[1][0], read[0][1], read[1][1], *tail)
        wanted = measured if e.measure else []
        return (made[0] if has_row else ()), (made[-1] if has_col else ()), wanted

    return encode


def _shape(e: Encoding, pow2: bool) -> Shape:
    """The shape of tiles. Both operands at once need many registers, and more where scales take a division."""

    def broad(shape: Shape) -> Shape:
        return broadened(*e.shape, e.held, shape) if e.aligned and e.held is e.dtype else shape

    if e.col is None:
        return broad(LOW)
    if e.row is None:
        return TALL
    shape = broad(TALL) if pow2 else TALL
    return SQUARE if shape == TALL else shape


def fresh_scales(high: int, wide: int, blocks: bool) -> Fresh:
    return fresh_by_columns(high, -(-wide // BLOCK), torch.float32) if blocks else fresh((high, 1), torch.float32)


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
    """Amaxes of blocks, which a weight that is sharded across blocks needs. Square blocks are measured once for both
    operands."""
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


# ---------------------------------------------------------------------------------- arguments of the sources


@cache
def _macros(row: str | None, col: str | None, square: bool, blocks: bool) -> tuple[str, ...]:
    wanted = (("LPQ_ROW", row), ("LPQ_COL", col))
    elements = (f"{name}={element.upper()}" for name, element in wanted if element is not None)
    return *elements, *(["LPQ_SQUARE"] if square else []), *(["LPQ_BLOCKS"] if blocks else [])


@cache
def _options(pow2: bool, stats: bool) -> tuple[str, ...]:
    """Return the macros for blocks along the rows: scales are powers of two; amaxes are given or wanted."""
    return *(["LPQ_POW2"] if pow2 else []), *(["LPQ_STATS"] if stats else [])
