"""MXFP8's CUDA kernel: both operands from one read of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.core.operations import measure_reference, quantize_reference
from lpq.ops.cuda import CudaKernel
from lpq.ops.tiles import INPUTS, THREADS, flat, pointer, tiles, untile, words_of_tiles
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.storage import ELEMENTS

KERNEL = CudaKernel("mxfp8/quantize.cu", "quantize", "PPPPPPPPPPqq", threads=THREADS)
BLOCK = 32


def measure(x: Tensor, row: MXFP8Quantizer | None, col: MXFP8Quantizer | None) -> list[Tensor]:
    """The amaxes of the blocks of the wanted operands."""
    if x.numel() == 0:
        return measure_reference(x, row, col)
    x = x.contiguous()
    (rows, cols), f32 = x.shape, torch.float32
    of_rows = x.new_empty((rows, -(-cols // BLOCK)), dtype=f32) if row is not None else None
    of_cols = x.new_empty((cols, -(-rows // BLOCK)), dtype=f32) if col is not None else None
    _launch(x, row, col, None, None, None, None, None, None, of_rows, of_cols, None)
    return [amaxes for amaxes in (of_rows, of_cols) if amaxes is not None]


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None],
    row: MXFP8Quantizer | None,
    col: MXFP8Quantizer | None,
    seed: Tensor | None,
    offset: int,
    measure: bool,
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
        scale = x.new_empty((high, blocks), dtype=torch.uint8)
        amaxes = x.new_empty((high, blocks), dtype=torch.float32) if measure else None
        out += (data, scale)
        if amaxes is not None:
            measured.append(amaxes)
        pointers.append((data, scale, next(given, None), amaxes))
    (rd, rs, rg, rm), (cd, cs, cg, cm) = pointers
    words = words_of_tiles(x) if rs is not None and cs is not None else None
    _launch(x, row, col, rd, rs, cd, cs, rg, cg, rm, cm, words)
    if words is not None and rs is not None and cs is not None:
        untile(words, rs, cs, rows, cols)
    return out + measured


def _launch(x: Tensor, row: MXFP8Quantizer | None, col: MXFP8Quantizer | None, *buffers: Tensor | None) -> None:
    rows, cols = flat(x) if col is None else x.shape
    macros = _macros(x.dtype, row.dtype if row is not None else None, col.dtype if col is not None else None)
    KERNEL.launch(x.get_device(), macros, tiles(rows, cols), x.data_ptr(), *map(pointer, buffers), rows, cols)


@cache
def _macros(dtype: torch.dtype, row: str | None, col: str | None) -> tuple[str, ...]:
    wanted = (("LPQ_ROW", row), ("LPQ_COL", col))
    return INPUTS[dtype], *(f"{name}={element.upper()}" for name, element in wanted if element is not None)
