"""MXFP8's CUDA kernel: both operands from one read of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.kernels.tiles import LOW, TALL, broad, by_columns, covering, is_whole, pointer, reading, tile_kernels, tiles
from lpq.operations.measuring import measure_reference
from lpq.operations.quantizing import quantize_reference
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.reference import ELEMENTS

KERNELS = tile_kernels("mxfp8/quantize.cu", "quantize", "PPPPPPPPP")
BLOCK = 32


def measure(
    x: Tensor, row: MXFP8Quantizer | None, col: MXFP8Quantizer | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The amaxes of the blocks of the wanted operands."""
    if x.numel() == 0:
        return measure_reference(x, row, col)
    x = x.contiguous()
    (rows, cols), f32 = x.shape, torch.float32
    of_rows = x.new_empty((rows, -(-cols // BLOCK)), dtype=f32) if row is not None else None
    of_cols = x.new_empty((cols, -(-rows // BLOCK)), dtype=f32) if col is not None else None
    _launch(x, dtype or x.dtype, row, col, None, None, None, None, None, None, of_rows, of_cols)
    return [amaxes for amaxes in (of_rows, of_cols) if amaxes is not None]


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: MXFP8Quantizer | None,
    col: MXFP8Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """As the reference. Amaxes that are not given are those of the blocks."""
    if x.numel() == 0:
        return quantize_reference(x, stats, row, col, seed, offset, measure)
    x = x.contiguous()
    rows, cols = x.shape
    given = iter([None if s is None else s.contiguous() for s in stats])
    out: list[Tensor] = []
    measured: list[Tensor] = []
    pointers: list[tuple[Tensor | None, ...]] = []
    for side, high, wide in ((row, rows, cols), (col, cols, rows)):
        if side is None:
            pointers.append((None, None, None, None))
            continue
        blocks = -(-wide // BLOCK)
        data = x.new_empty((high, wide), dtype=ELEMENTS[side.dtype])
        scale = by_columns(x, high, blocks, torch.uint8)
        amaxes = x.new_empty((high, blocks), dtype=torch.float32) if measure else None
        out += (data, scale)
        if amaxes is not None:
            measured.append(amaxes)
        pointers.append((data, scale, next(given, None), amaxes))
    (rd, rs, rg, rm), (cd, cs, cg, cm) = pointers
    _launch(x, dtype or x.dtype, row, col, rd, rs, cd, cs, rg, cg, rm, cm)
    return out + measured


def _launch(
    x: Tensor,
    dtype: torch.dtype,
    row: MXFP8Quantizer | None,
    col: MXFP8Quantizer | None,
    *buffers: Tensor | None,
) -> None:
    shape = LOW if col is None else TALL
    if row is not None:
        shape = broad(x, dtype, shape)
    rows, cols = x.shape
    stats = any(t is not None for t in buffers[4:8])
    macros = _macros(row.dtype if row is not None else None, col.dtype if col is not None else None, stats)
    KERNELS[shape].launch(
        x.get_device(), reading(x.dtype, dtype) + macros + covering(shape, is_whole(x, rows, cols, shape)),
        tiles(rows, cols, shape), x.data_ptr(), *map(pointer, buffers), rows, cols,
    )  # fmt: skip


@cache
def _macros(row: str | None, col: str | None, stats: bool) -> tuple[str, ...]:
    wanted = (("LPQ_ROW", row), ("LPQ_COL", col))
    elements = (f"{name}={element.upper()}" for name, element in wanted if element is not None)
    return *elements, *(["LPQ_STATS"] if stats else [])
