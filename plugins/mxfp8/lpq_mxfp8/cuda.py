"""MXFP8's CUDA kernel: both operands from one read of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.kernels.fresh import fresh, fresh_by_columns
from lpq.kernels.tiles import (
    LOW,
    TALL,
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
from lpq.operations.fused_pair import Job, Made, Make
from lpq.operations.measuring import measure_reference
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.reference import ELEMENTS

KERNELS = tile_kernels("mxfp8/quantize.cu", "quantize", "PPPPPPPPP")
BLOCK = 32
UNKNOWN = (None,)
NOTHING = Made((), (), (0, 0, 0, 0))
"""In place of an operand that is not wanted."""


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
    dtype = dtype or x.dtype
    shape = LOW if col is None else TALL
    if row is not None:
        shape = broad(x, dtype, shape)
    macros = _macros(row.dtype if row is not None else None, col.dtype if col is not None else None, True)
    KERNELS[shape].launch(
        x.get_device(), reading(x.dtype, dtype) + macros + covering(shape, is_whole(x, rows, cols, shape)),
        tiles(rows, cols, shape), x.data_ptr(), 0, 0, 0, 0, 0, 0, pointer(of_rows), pointer(of_cols), rows, cols,
    )  # fmt: skip
    return [amaxes for amaxes in (of_rows, of_cols) if amaxes is not None]


def bind(e: Encoding) -> Encode:
    """How matrices of one shape are encoded. Amaxes that are not given are measured of the blocks."""
    (rows, cols), row, col = e.shape, e.row, e.col
    shape = LOW if col is None else TALL
    if row is not None and e.aligned and e.held is e.dtype:
        shape = broadened(rows, cols, e.held, shape)
    job = Job((rows, cols), e.held, e.device, e.offset, e.measure, e.dispatched)
    make_row = bind_operand(row, job) if row is not None else None
    make_col = bind_operand(col, job._replace(shape=(cols, rows))) if col is not None else None
    macros = _macros(row.dtype if row else None, col.dtype if col else None, e.measure or True in e.given)
    launch = KERNELS[shape].bind(
        e.device.index or 0,
        reading(e.held, e.dtype) + macros + covering(shape, e.aligned and divides(rows, cols, shape)),
        tiles(rows, cols, shape),
    )

    def encode(x: Tensor, at: int, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        first = make_row(stats[:1] or UNKNOWN, None, None, None) if make_row is not None else NOTHING
        second = make_col(stats[-1:] or UNKNOWN, None, None, None) if make_col is not None else NOTHING
        rd, rs, rg, rm = first.parameters
        cd, cs, cg, cm = second.parameters
        launch(at, rd, rs, cd, cs, rg, cg, rm, cm, rows, cols)
        return first.buffers, second.buffers, (*first.measured, *second.measured)

    return encode


quantize = cached_by_shape(bind)


def bind_operand(quantizer: MXFP8Quantizer, job: Job) -> Make:
    """Decide how one operand is allocated."""
    (high, wide), empty = job.shape, job.empty
    blocks = -(-wide // BLOCK)
    data, scale = fresh(job.shape, ELEMENTS[quantizer.dtype]), fresh_by_columns(high, blocks, torch.uint8)
    wanted = fresh((high, blocks), torch.float32) if job.measure else None

    def make(
        stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
    ) -> Made:
        if into is not None:
            return Made(into, (), (*map(Tensor.data_ptr, into), 0, 0, 0)[:4])
        buffers = empty(*data), empty(*scale)
        measured = () if wanted is None else (empty(*wanted),)
        (given,) = stats
        parameters = (
            buffers[0].data_ptr(), buffers[1].data_ptr(), 0 if given is None else given.data_ptr(),
            measured[0].data_ptr() if measured else 0,
        )  # fmt: skip
        return Made(buffers, measured, parameters)

    return make


@cache
def _macros(row: str | None, col: str | None, stats: bool) -> tuple[str, ...]:
    wanted = (("LPQ_ROW", row), ("LPQ_COL", col))
    elements = (f"{name}={element.upper()}" for name, element in wanted if element is not None)
    return *elements, *(["LPQ_STATS"] if stats else [])
