"""NVFP4's Triton kernels: one read for the amaxes of the operands, one more for both operands."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpq.core import Storage
from lpq.formats.format import Direction
from lpq.kernels.triton import block_amaxes, empty_amaxes, launch, programs, transpose_nibbles
from lpq.kernels.triton.kernels import as_bits
from lpq.kernels.triton.numbers import (
    FLT_MAX,
    INF,
    cast_e2m1,
    cast_e2m1_stochastic,
    cast_float8,
    decode_e2m1,
    decode_float8,
    pack_nibbles,
    reciprocal,
    size_of,
    unpack_nibbles,
    widen,
)
from lpq.kernels.triton.random_bits import random_bytes
from lpq.kernels.triton.rotation import rotate, unrotate
from lpq.kernels.triton.tiles import (
    block_amax,
    block_grid,
    known_amax,
    load_tile,
    measure_tile,
    place_of_tile,
    spread,
    store_tile,
    store_values,
)
from lpq.operations.decoding import decode_reference
from lpq.operations.inputs import DTYPES
from lpq.operations.measuring import measure_reference
from lpq.operations.references import quantize_reference
from lpq.operations.sides import declared, shared
from lpq.operations.tile_program import TileProgram
from lpq.operations.transposing import transpose_reference
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import BLOCKS, GROUP, SCALED
from lpq_nvfp4.storage import NVFP4Storage

WIDTH = tl.constexpr(GROUP)
TILE, ENCODED = 64, 32

# ---------------------------------------------------------------------------------- measuring


@triton.jit
def _amaxes(x, row, col, rows, cols, amax, block_amaxes, HIGH: tl.constexpr, ROTATED: tl.constexpr, ROWS: tl.constexpr):
    if ROTATED:
        x = rotate(x)
    measure_tile(x, row, col, rows, cols, amax, 1 if ROWS else 0, 0)
    if block_amaxes is not None:
        measure_tile(x, row, col, rows, cols, block_amaxes, HIGH, WIDTH)


@triton.jit
def _measure(
    x, row_amax, row_blocks, col_amax, col_blocks, rows, cols,
    ROW_HIGH: tl.constexpr, ROW_ROTATED: tl.constexpr, COL_HIGH: tl.constexpr, COL_ROTATED: tl.constexpr,
    ROW_ROWS: tl.constexpr, COL_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, col = place_of_tile(cols, TILE, TILE)
    values = load_tile(x, row, col, rows, cols, TILE, TILE)
    if row_amax is not None:
        _amaxes(widen(values), row, col, rows, cols, row_amax, row_blocks, ROW_HIGH, ROW_ROTATED, ROW_ROWS)
    if col_amax is not None:
        _amaxes(widen(tl.trans(values)), col, row, cols, rows, col_amax, col_blocks, COL_HIGH, COL_ROTATED, COL_ROWS)


def measure(x: Tensor, row: NVFP4Quantizer | None, col: NVFP4Quantizer | None) -> list[Tensor]:
    """The amaxes of the wanted operands and of their blocks."""
    if x.numel() == 0:
        return measure_reference(x, row, col)
    return [amax for amax in _measured(x.contiguous(), row, col, blocks=True) if amax is not None]


def _measured(
    x: Tensor, row: NVFP4Quantizer | None, col: NVFP4Quantizer | None, *, blocks: bool
) -> list[Tensor | None]:
    """The statistics of the wanted operands; None in place of the amaxes of blocks that are not wanted."""
    rows, cols = x.shape
    sides = ((row, (rows, cols)), (None if shared(row, col) else col, (cols, rows)))
    plain: Tensor | None = None
    if not blocks and any(side is not None and _is_plain(side) for side, _ in sides):
        (plain,) = block_amaxes(x, (None, None), None)
    out: list[Tensor | None] = []
    buffers: list[Tensor | None] = []
    for side, grid in sides:
        found: list[Tensor | None] = [None, None]
        if side is not None and plain is not None and _is_plain(side):
            out += [plain, None]
        elif side is not None:
            found[0] = empty_amaxes(x, *grid, SCALED[side.scaling])
            found[1] = empty_amaxes(x, *grid, BLOCKS[side.block]) if blocks else None
            out += found
        buffers += map(as_bits, found)
    if any(buffer is not None for buffer in buffers):
        launch(
            _measure, programs(x.shape, TILE, TILE), x, *buffers, rows, cols,
            ROW_HIGH=_high(row), ROW_ROTATED=_rotated(row), COL_HIGH=_high(col), COL_ROTATED=_rotated(col),
            ROW_ROWS=_by_rows(row), COL_ROWS=_by_rows(col), TILE=TILE, num_warps=4,
        )  # fmt: skip
    return out


def _is_plain(side: NVFP4Quantizer) -> bool:
    """Whether its amax is the amax of the matrix."""
    return not (side.rht or _by_rows(side))


def _high(side: NVFP4Quantizer | None) -> int:
    return GROUP if side is not None and side.block == "16x16" else 1


def _rotated(side: NVFP4Quantizer | None) -> bool:
    return side is not None and side.rht


def _stochastic(side: NVFP4Quantizer | None, seed: Tensor | None) -> bool:
    return side is not None and bool(side.stochastic) and seed is not None


def _roomy(side: NVFP4Quantizer | None) -> bool:
    return side is not None and side.unbiased


def _by_rows(side: NVFP4Quantizer | None) -> bool:
    return side is not None and side.scaling == "row"


def _norm(side: NVFP4Quantizer | None) -> int:
    """The norm of four over six, negative where errors are squared; 0 where no scale is searched."""
    if side is None or not side.searches:
        return 0
    return side.norm if side.error == "mae" else -side.norm


# ---------------------------------------------------------------------------------- encoding


@triton.jit
def _in_order(x, total):
    """``total`` and the eight values along the last dimension, added one after the other."""
    down: tl.constexpr = x.shape[0]
    across: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, (down, across, 4, 2)))
    a, c = tl.split(tl.reshape(even, (down, across, 2, 2)))  # 0 and 4, 2 and 6
    b, d = tl.split(tl.reshape(odd, (down, across, 2, 2)))  # 1 and 5, 3 and 7
    first, fifth = tl.split(a)
    second, sixth = tl.split(b)
    third, seventh = tl.split(c)
    fourth, eighth = tl.split(d)
    return total + first + second + third + fourth + fifth + sixth + seventh + eighth


@triton.jit
def _rows_of_quarters(x):
    """The sum of the sums of the rows of each 8x8."""
    down: tl.constexpr = x.shape[0]
    across: tl.constexpr = x.shape[1]
    rows = _in_order(tl.reshape(x, (down * across, 8, 8)), tl.zeros((down * across, 8), tl.float32))
    return _in_order(tl.reshape(rows, (down, across, 8)), tl.zeros((down, across), tl.float32))


@triton.jit
def summed(errors, HIGH: tl.constexpr):
    """The sum of each block, in the order of the reference."""
    high: tl.constexpr = errors.shape[0]
    wide: tl.constexpr = errors.shape[1]
    if HIGH == 1:
        halves = tl.permute(tl.reshape(errors, (high, wide // WIDTH, 2, WIDTH // 2)), (0, 1, 3, 2))
        first, last = tl.split(halves)
        total = _in_order(last, _in_order(first, tl.zeros((high, wide // WIDTH), tl.float32)))
    else:
        quarters = tl.permute(tl.reshape(errors, (high // 8, 8, wide // 8, 8)), (0, 2, 1, 3))
        both = _rows_of_quarters(quarters) + _rows_of_quarters(tl.permute(quarters, (0, 1, 3, 2)))
        each = tl.permute(tl.reshape(both, (high // 16, 2, wide // 16, 2)), (0, 2, 1, 3))
        left, right = tl.split(each)
        first, below = tl.split(left)
        above, last = tl.split(right)
        total = (first + last) + (above + below)
    return total


@triton.jit
def scale_code(scale):
    scale = tl.where(scale > 448.0, 448.0, scale)
    return cast_float8(scale, scale, False)


@triton.jit
def scale_of(code, overall):
    """The scale of blocks and the factor of their elements."""
    scale = decode_float8(code, False)
    factor = reciprocal(scale * reciprocal(overall))
    return scale, tl.where(factor > FLT_MAX, FLT_MAX, factor)


@triton.jit
def _errors(x, code, overall, whole, HIGH: tl.constexpr, NORM: tl.constexpr):
    """The error of each block with the scales of these codes."""
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    scale, factor = scale_of(code, overall)
    values = decode_e2m1(cast_e2m1(x * spread(factor, high, wide))) * spread(scale, high, wide) * whole
    lost = tl.div_rn(values, tl.full((high, wide), 6.0 * (NORM if NORM > 0 else -NORM), tl.float32)) - x
    return summed(tl.abs(lost) if NORM > 0 else lost * lost, HIGH)


@triton.jit
def _encode(
    x, row, col, rows, cols, data, scale, amax_out, amax, given, seed, offset_row, offset_col,
    DIRECTION: tl.constexpr, HIGH: tl.constexpr, ROTATED: tl.constexpr, STOCHASTIC: tl.constexpr, ROOMY: tl.constexpr,
    NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of one operand. The amax of the matrix or of each row is known; amaxes of blocks are given, or are
    measured of the tile."""
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    if ROTATED:
        x = rotate(x)
    places_of_amax = row + tl.arange(0, high)[:, None] if ROWS else tl.zeros((1, 1), tl.int64)
    inside_of_amax = places_of_amax < (rows if ROWS else 1)
    whole = tl.load(amax + places_of_amax, mask=inside_of_amax, other=0)
    largest = whole
    if ROOMY or NORM == 256 or NORM == -256:
        roomy = largest * (1.0625 if ROOMY else 1.75)
        largest = tl.where(size_of(largest) < INF, tl.where(roomy > FLT_MAX, FLT_MAX, roomy), largest)
    before = col if ROWS else row + col  # other tiles write nothing
    tl.store(amax_out + places_of_amax, largest, mask=places_of_amax + before * rows < (rows if ROWS else 1))
    overall = tl.div_rn(tl.full(largest.shape, 2688.0, tl.float32), largest)
    overall = tl.where(overall > FLT_MAX, FLT_MAX, overall)
    overall = tl.where((largest > 0) & (size_of(largest) < INF), overall, 1.0)
    places, inside = block_grid(row, col, rows, cols, high // HIGH, wide // WIDTH, HIGH, WIDTH)
    own = block_amax(x, high // HIGH, wide // WIDTH)
    known = known_amax(given, own, places, inside)
    if NORM:
        encoded = tl.div_rn(known, tl.full(known.shape, 6.0, tl.float32)) * overall
    else:
        encoded = known * (overall * (0.17708333333333334 if ROOMY else 0.16666666666666666))
    code = scale_code(encoded)
    if NORM:
        larger = scale_code(encoded * 1.5)
        better = _errors(x, larger, overall, whole, HIGH, NORM) < _errors(x, code, overall, whole, HIGH, NORM)
        code = tl.where(better, larger, code)
    to, _ = block_grid(row, col, rows, cols, high // HIGH, wide // WIDTH, HIGH, WIDTH, HIGH == 1)
    tl.store(scale + to, code, mask=inside)
    _, factor = scale_of(code, overall)
    values = x * spread(factor, high, wide)
    if STOCHASTIC:
        group = (col + offset_col) // WIDTH
        random = random_bytes(seed, row + offset_row, group, DIRECTION, high, wide // WIDTH)
        codes = cast_e2m1_stochastic(values, random)
    else:
        codes = cast_e2m1(values)
    if not ROTATED:  # else what pads the columns was rotated with them
        codes = tl.where((col + tl.arange(0, wide) < cols)[None, :], codes, 0)
    packed = ((cols - 1) // WIDTH + 1) * (WIDTH // 2)
    store_tile(data, pack_nibbles(codes), row, col // 2, rows, packed)


# Statistics may be views of what ranks reduced: one program for them wherever they lie.
@triton.jit(do_not_specialize_on_alignment=["row_amax", "row_given", "col_amax", "col_given"])
def _quantize(
    x, row_data, row_scale, row_out, row_amax, row_given, col_data, col_scale, col_out, col_amax, col_given,
    seed, offset, rows, cols,
    ROW_HIGH: tl.constexpr, ROW_ROTATED: tl.constexpr, ROW_STOCHASTIC: tl.constexpr, ROW_ROOMY: tl.constexpr,
    COL_HIGH: tl.constexpr, COL_ROTATED: tl.constexpr, COL_STOCHASTIC: tl.constexpr, COL_ROOMY: tl.constexpr,
    ROW_NORM: tl.constexpr, COL_NORM: tl.constexpr, ROW_ROWS: tl.constexpr, COL_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, col = place_of_tile(cols, TILE, TILE)
    values = load_tile(x, row, col, rows, cols, TILE, TILE)
    if row_data is not None:
        _encode(widen(values), row, col, rows, cols, row_data, row_scale, row_out, row_amax, row_given, seed, offset, 0,
                0, ROW_HIGH, ROW_ROTATED, ROW_STOCHASTIC, ROW_ROOMY, ROW_NORM, ROW_ROWS)  # fmt: skip
    if col_data is not None:
        _encode(widen(tl.trans(values)), col, row, cols, rows, col_data, col_scale, col_out, col_amax, col_given, seed,
                0, offset, 1, COL_HIGH, COL_ROTATED, COL_STOCHASTIC, COL_ROOMY, COL_NORM, COL_ROWS)  # fmt: skip


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: NVFP4Quantizer | None,
    col: NVFP4Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> list[Tensor]:
    """Encode as the reference does. The reference itself is called for an empty matrix, and where the first row of a
    shard cuts a group of 16 rows that share random bits of the column operand, which happens in no layer."""
    cut = _stochastic(col, seed) and offset % GROUP
    if x.numel() == 0 or cut:
        return quantize_reference(x, stats, row, col, seed, offset, measure)
    x = x.contiguous()
    rows, cols = x.shape
    given: list[Tensor | None] = list(stats) or [None] * len(declared(row, col))
    measured: list[Tensor | None] = []
    known = given
    if measure or None in given[::2]:
        measured = _measured(x, row, col, blocks=measure)
        known = [m if g is None else g for g, m in zip(given, measured, strict=True)]
    if shared(row, col):
        known = [*known, known[0], known[1].t() if known[1] is not None else None]
    out: list[Tensor] = []
    buffers: list[Tensor | None] = []
    for side, grid in ((row, (rows, cols)), (col, (cols, rows))):
        if side is None:
            buffers += [None] * 5
            continue
        operand = NVFP4Storage.fresh(side, grid, x)
        out += operand.tensors()
        (amax, blocks), known = known[:2], known[2:]
        buffers += [operand.data, operand.scale.view(torch.uint8), operand.amax, amax]
        buffers.append(blocks.contiguous() if blocks is not None else None)
    launch(
        _quantize, programs(x.shape, ENCODED, ENCODED), x, *buffers, seed, offset, rows, cols,
        ROW_HIGH=_high(row), ROW_ROTATED=_rotated(row), ROW_STOCHASTIC=_stochastic(row, seed), ROW_ROOMY=_roomy(row),
        COL_HIGH=_high(col), COL_ROTATED=_rotated(col), COL_STOCHASTIC=_stochastic(col, seed), COL_ROOMY=_roomy(col),
        ROW_NORM=_norm(row), COL_NORM=_norm(col), ROW_ROWS=_by_rows(row), COL_ROWS=_by_rows(col),
        TILE=ENCODED, num_warps=1,
    )  # fmt: skip
    return out + [amax for amax in measured if amax is not None] if measure else out


@triton.jit
def _write(x, row, col, rows, cols, buffers, stats, seed, offset, OPTIONS: tl.constexpr):
    STOCHASTIC: tl.constexpr = OPTIONS[3] if seed is not None else False
    _encode(x, row, col, rows, cols, buffers[0], buffers[1], buffers[2], stats[0], stats[1], seed,
            0 if OPTIONS[0] else offset, offset if OPTIONS[0] else 0, 1 if OPTIONS[0] else 0,
            OPTIONS[1], OPTIONS[2], STOCHASTIC, OPTIONS[4], OPTIONS[5], OPTIONS[6])  # fmt: skip


@triton.jit
def _measure_tile(x, row, col, rows, cols, measured, OPTIONS: tl.constexpr):
    if OPTIONS[2]:
        x = rotate(x)
    if measured[0] is not None:
        measure_tile(x, row, col, rows, cols, measured[0], 1 if OPTIONS[6] else 0, 0)
    if measured[1] is not None:
        measure_tile(x, row, col, rows, cols, measured[1], OPTIONS[1], WIDTH)


def tile_program(quantizer: NVFP4Quantizer, direction: Direction, dtype: torch.dtype) -> TileProgram:
    """The functions for a tile of either operand."""
    col, high = direction == "col", _high(quantizer)
    options = (
        col, high, _rotated(quantizer), bool(quantizer.stochastic), _roomy(quantizer), _norm(quantizer),
        _by_rows(quantizer),
    )  # fmt: skip
    aligned = GROUP if col and quantizer.stochastic else 1  # rows that share random bits
    return TileProgram(_write, _measure_tile, options, before=(True, False), block=(high, GROUP), aligned=aligned)


# ---------------------------------------------------------------------------------- views


@triton.jit
def _decode(
    data,
    scale,
    amax,
    out,
    rows,
    cols,
    HIGH: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row, col = place_of_tile(cols, TILE, TILE)
    packed = ((cols - 1) // WIDTH + 1) * (WIDTH // 2)
    values = decode_e2m1(unpack_nibbles(load_tile(data, row, col // 2, rows, packed, TILE, TILE // 2)))
    places, inside = block_grid(row, col, rows, cols, TILE // HIGH, TILE // WIDTH, HIGH, WIDTH, HIGH == 1)
    factor = decode_float8(tl.load(scale + places, mask=inside, other=0), False)
    amaxes = row + tl.arange(0, TILE)[:, None] if ROWS else tl.zeros((1, 1), tl.int64)
    largest = tl.load(amax + amaxes, mask=amaxes < (rows if ROWS else 1), other=0)
    # A large amax would overflow before the last factor. Divided by 2^12 until then, it changes no bit.
    shifted = largest > 1
    values = values * spread(factor, TILE, TILE)
    values = values * tl.where(shifted, largest * 0.000244140625, largest)
    values = values * tl.where(shifted, 4096.0 * (1.0 / 2688.0), 1.0 / 2688.0)
    if ROTATED:
        values = unrotate(values)
    store_values(out, values, row, col, rows, cols)


def decode(operand: NVFP4Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    rows, cols = operand.shape
    if dtype not in DTYPES or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale, _ = (buffer.laid(t) for buffer, t in zip(operand.quantizer.layout, operand.tensors(), strict=True))
    out = data.new_empty((rows, cols), dtype=dtype)
    launch(
        _decode, programs((rows, cols), TILE, TILE), data, scale.view(torch.uint8), operand.amax, out, rows, cols,
        HIGH=_high(operand.quantizer), ROTATED=operand.quantizer.rht, ROWS=_by_rows(operand.quantizer), TILE=TILE,
        num_warps=2,
    )  # fmt: skip
    return out


def transpose(operand: NVFP4Storage) -> Storage:
    """The operand of the transposed matrix."""
    rows, cols = operand.shape
    if not rows or not cols:
        return transpose_reference(operand).map(torch.clone)
    data = transpose_nibbles(operand.data, rows, cols, GROUP)
    transposed = NVFP4Storage(
        data=data, scale=operand.scale.t().clone(memory_format=torch.contiguous_format), amax=operand.amax.clone()
    )
    return transposed.bind(operand.quantizer, (cols, rows), operand.dtype)
