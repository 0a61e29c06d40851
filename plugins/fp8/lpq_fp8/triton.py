"""FP8's Triton kernels: one read of the tensor for its amaxes unless they are given, one for both operands."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpq.core import Storage
from lpq.formats.format import Direction
from lpq.kernels.triton import block_amaxes, empty_amaxes, launch, programs, transpose_bytes
from lpq.kernels.triton.kernels import as_bits, sizes
from lpq.kernels.triton.numbers import (
    FLT_MAX,
    INF,
    bits_of,
    cast_float8,
    decode_float8,
    reciprocal,
    size_of,
    value_of,
    widen,
)
from lpq.kernels.triton.tiles import (
    block_amax,
    block_grid,
    known_amax,
    load_tile,
    measure_tile,
    place_of_tile,
    seen_first,
    spread,
    store_amax,
    store_tile,
    store_values,
)
from lpq.operations.decoding import decode_reference
from lpq.operations.inputs import DTYPES
from lpq.operations.measuring import measure_reference
from lpq.operations.references import quantize_reference
from lpq.operations.sides import declared, shared
from lpq.operations.stored_tile import StoredTile
from lpq.operations.tile_program import TileProgram
from lpq.operations.transposing import transpose_reference
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.reference import BLOCKS
from lpq_fp8.storage import FP8Storage

TILE = 64
WIDTH = tl.constexpr(128)


@triton.jit
def _scale(amax, E5M2: tl.constexpr, LARGEST_SCALE: tl.constexpr, POW2: tl.constexpr):
    scale = tl.div_rn(tl.full(amax.shape, 57344.0 if E5M2 else 448.0, tl.float32), amax)
    scale = tl.where(size_of(scale) == INF, LARGEST_SCALE, scale)
    if POW2:
        scale = value_of(bits_of(scale) & INF)
    return tl.where((amax > 0) & (size_of(amax) < INF), scale, 1.0)


@triton.jit
def _encode(
    x, row, col, rows, cols, data, scale, amax, measured,
    HIGH: tl.constexpr, WIDE: tl.constexpr, E5M2: tl.constexpr, LARGEST_SCALE: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """A tile of one operand, whose amaxes are known, or are the tile's."""
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    DOWN: tl.constexpr = high // HIGH if HIGH and high > HIGH else 1
    ACROSS: tl.constexpr = wide // WIDE if WIDE and wide > WIDE else 1
    places, inside = block_grid(row, col, rows, cols, DOWN, ACROSS, HIGH, WIDE)
    own = block_amax(x, DOWN, ACROSS)
    if measured is not None:
        store_amax(measured, own, places, inside, HIGH, WIDE)
    factor = _scale(known_amax(amax, own, places, inside), E5M2, LARGEST_SCALE, POW2)
    to, _ = block_grid(row, col, rows, cols, DOWN, ACROSS, HIGH, WIDE, HIGH == 1)
    tl.store(scale + to, reciprocal(factor), mask=inside & seen_first(row, col, DOWN, ACROSS, HIGH, WIDE))
    store_tile(data, cast_float8(x * spread(factor, high, wide), x, E5M2), row, col, rows, cols)


# Statistics may be views of what ranks reduced: one program for them wherever they lie.
@triton.jit(do_not_specialize_on_alignment=["row_amax", "col_amax"])
def _quantize(
    x, row_data, row_scale, row_amax, row_measured, col_data, col_scale, col_amax, col_measured, rows, cols,
    ROW_HIGH: tl.constexpr, ROW_WIDE: tl.constexpr, ROW_E5M2: tl.constexpr, ROW_LARGEST: tl.constexpr,
    ROW_POW2: tl.constexpr, COL_HIGH: tl.constexpr, COL_WIDE: tl.constexpr, COL_E5M2: tl.constexpr,
    COL_LARGEST: tl.constexpr, COL_POW2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, col = place_of_tile(cols, TILE, TILE)
    values = load_tile(x, row, col, rows, cols, TILE, TILE)
    if row_data is not None:
        _encode(widen(values), row, col, rows, cols, row_data, row_scale, row_amax, row_measured,
                ROW_HIGH, ROW_WIDE, ROW_E5M2, ROW_LARGEST, ROW_POW2)  # fmt: skip
    if col_data is not None:
        _encode(widen(tl.trans(values)), col, row, cols, rows, col_data, col_scale, col_amax, col_measured,
                COL_HIGH, COL_WIDE, COL_E5M2, COL_LARGEST, COL_POW2)  # fmt: skip


def measure(x: Tensor, row: FP8Quantizer | None, col: FP8Quantizer | None) -> list[Tensor]:
    """The statistics of the wanted operands."""
    if x.numel() == 0:
        return measure_reference(x, row, col)
    first = row.scaled_block if row is not None else None
    second = col.scaled_block if col is not None and not shared(row, col) else None
    return block_amaxes(x.contiguous(), first, second)


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: FP8Quantizer | None,
    col: FP8Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
) -> list[Tensor]:
    """Encode as the reference does."""
    if x.numel() == 0:
        return quantize_reference(x, stats, row, col, seed, offset, measure)
    x = x.contiguous()
    rows, cols = x.shape
    wanted = declared(row, col)
    known: list[Tensor | None] = list(stats) or [None] * len(wanted)
    measured: list[Tensor] = []
    by_product: list[Tensor | None] = [None, None]
    if measure and None not in known and all(None in stat.block for stat, _ in wanted):
        measured = [empty_amaxes(x, *((rows, cols) if dim == 0 else (cols, rows)), s.block) for s, dim in wanted]
        by_product = [*measured, None]
    elif measure or None in known:
        measured = measured_before(x, row, col)
        known = [m if k is None else k for k, m in zip(known, measured, strict=True)]
    amaxes = [amax for amax in known if amax is not None]
    if shared(row, col):
        amaxes.append(amaxes[0].t())
    out: list[Tensor] = []
    buffers: list[Tensor | None] = []
    for side, grid in ((row, (rows, cols)), (col, (cols, rows))):
        if side is None:
            buffers += [None] * 4
            continue
        operand = FP8Storage.fresh(side, grid, x)
        out += operand.tensors()
        buffers += [operand.data.view(torch.uint8), operand.scale, amaxes.pop(0).contiguous()]
        buffers.append(as_bits(by_product.pop(0)))
    launch(
        _quantize, programs(x.shape, TILE, TILE), x, *buffers, rows, cols,
        **_constants("ROW", x, row), **_constants("COL", x, col), TILE=TILE, num_warps=2,
    )  # fmt: skip
    return out + measured if measure else out


measured_before = measure


def _constants(name: str, x: Tensor, side: FP8Quantizer | None) -> dict[str, object]:
    """The options of an operand as constants of the kernel; any, of one that is not wanted."""
    side = side or FP8Quantizer()
    return {
        **sizes(name, side.scaled_block),
        f"{name}_E5M2": side.dtype == "e5m2",
        f"{name}_LARGEST": side.largest_scale(x.dtype),
        f"{name}_POW2": side.pow2_scales,
    }


# ---------------------------------------------------------------------------------- views


@triton.jit
def _decode(
    data, scale, out, rows, cols,
    HIGH: tl.constexpr, WIDE: tl.constexpr, E5M2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, col = place_of_tile(cols, TILE, TILE)
    values = decode_float8(load_tile(data, row, col, rows, cols, TILE, TILE), E5M2)
    DOWN: tl.constexpr = TILE // HIGH if HIGH and HIGH < TILE else 1
    ACROSS: tl.constexpr = TILE // WIDE if WIDE and WIDE < TILE else 1
    places, inside = block_grid(row, col, rows, cols, DOWN, ACROSS, HIGH, WIDE, HIGH == 1)
    factor = tl.load(scale + places, mask=inside, other=0.0)
    store_values(out, values * spread(factor, TILE, TILE), row, col, rows, cols)


def decode(operand: FP8Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    (rows, cols), quantizer = operand.shape, operand.quantizer
    if dtype not in DTYPES or not rows or not cols:
        return decode_reference(operand, dtype)
    data, scale = (buffer.laid(t) for buffer, t in zip(quantizer.layout, operand.tensors(), strict=True))
    out = data.new_empty((rows, cols), dtype=dtype)
    high, wide = quantizer.scaled_block
    launch(
        _decode, programs((rows, cols), TILE, TILE), data.view(torch.uint8), scale, out, rows, cols,
        HIGH=high or 0, WIDE=wide or 0, E5M2=quantizer.dtype == "e5m2", TILE=TILE, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _values(
    data, scale, row, col, rows, cols, OPTIONS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """A tile of an operand in blocks of one row, decoded."""
    values = decode_float8(load_tile(data, row, col, rows, cols, HIGH, WIDE), OPTIONS % 2 == 1)
    places, inside = block_grid(row, col, rows, cols, HIGH, WIDE // WIDTH, 1, WIDTH)
    return values * spread(tl.load(scale + places, mask=inside, other=0.0), HIGH, WIDE)


@triton.jit
def _store(x, data, scale, row, col, rows, cols, OPTIONS: tl.constexpr):
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    places, inside = block_grid(row, col, rows, cols, high, wide // WIDTH, 1, WIDTH)
    amax = value_of(block_amax(x, high, wide // WIDTH))
    factor = _scale(amax, OPTIONS % 2 == 1, FLT_MAX, OPTIONS >= 2)
    tl.store(scale + places, reciprocal(factor), mask=inside)
    store_tile(data, cast_float8(x * spread(factor, high, wide), x, OPTIONS % 2 == 1), row, col, rows, cols)


def stored_tile(quantizer: FP8Quantizer) -> StoredTile | None:
    """The functions for a tile of a row operand that is kept; None: it is not in blocks of one row."""
    if quantizer.scaled_block != BLOCKS["1x128"]:
        return None
    return StoredTile(_values, _store, int(quantizer.dtype == "e5m2") + 2 * quantizer.pow2_scales, WIDTH.value)


# ---------------------------------------------------------------------------------- sources


@triton.jit
def _write(x, row, col, rows, cols, buffers, stats, seed, offset, OPTIONS: tl.constexpr):
    _encode(x, row, col, rows, cols, buffers[0], buffers[1], stats[0], None,
            OPTIONS[0], OPTIONS[1], OPTIONS[2], OPTIONS[3], OPTIONS[4])  # fmt: skip


@triton.jit
def _measure_tile(x, row, col, rows, cols, measured, OPTIONS: tl.constexpr):
    measure_tile(x, row, col, rows, cols, measured[0], OPTIONS[0], OPTIONS[1])


def tile_program(quantizer: FP8Quantizer, direction: Direction, dtype: torch.dtype) -> TileProgram:
    """The functions for a tile of either operand."""
    high, wide = quantizer.scaled_block
    options = (
        high or 0, wide or 0, quantizer.dtype == "e5m2", quantizer.largest_scale(dtype), quantizer.pow2_scales,
    )  # fmt: skip
    whole = high is None or wide is None
    return TileProgram(_write, _measure_tile, options, before=(whole,), block=(high or 1, wide or 1))


def transpose(operand: FP8Storage) -> Storage:
    """The operand of the transposed matrix."""
    rows, cols = operand.shape
    if not rows or not cols:
        return transpose_reference(operand).map(torch.clone)
    scale = operand.scale.t().clone(memory_format=torch.contiguous_format)
    transposed = FP8Storage(data=transpose_bytes(operand.data), scale=scale)
    return transposed.bind(operand.quantizer, (cols, rows), operand.dtype)
