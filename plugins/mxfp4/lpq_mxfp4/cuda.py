"""MXFP4's CUDA kernel: both operands from one read of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.formats.format import Direction
from lpq.kernels.fresh import fresh, fresh_by_columns
from lpq.kernels.tiles import (
    LOW,
    SQUARE,
    Shape,
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
from lpq_mxfp4.quantizer import MXFP4Quantizer
from lpq_mxfp4.reference import GROUP

PARAMETERS = "PPPPPq"
KERNELS = tile_kernels("mxfp4/quantize.cu", "quantize", f"P({PARAMETERS})({PARAMETERS})")
DRAWN = 16
"""Elements along the contraction that share a draw of random bits."""
UNKNOWN = (None,)
NOTHING = Made((), (), (0,) * len(PARAMETERS))
"""In place of an operand that is not wanted."""


def why_not(first: MXFP4Quantizer, second: MXFP4Quantizer | None = None) -> str | None:
    """Column operands only are rotated."""
    return "the row operand of a pair is not rotated" if second is not None and first.rht else None


def measure(
    x: Tensor, row: MXFP4Quantizer | None, col: MXFP4Quantizer | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The amaxes of the blocks of the wanted operands."""
    dtype = dtype or x.dtype
    if x.numel() == 0 or (row is not None and row.rht):
        return measure_reference(x.to(dtype), row, col)
    x = x.contiguous()
    (rows, cols), f32 = x.shape, torch.float32
    of_rows = x.new_empty((rows, -(-cols // GROUP)), dtype=f32) if row is not None else None
    of_cols = x.new_empty((cols, -(-rows // GROUP)), dtype=f32) if col is not None else None
    macros, shape = _macros(row, col, True)
    if col is None:
        shape = broad(x, dtype, shape)
    KERNELS[shape].launch(
        x.get_device(), reading(x.dtype, dtype) + macros + covering(shape, is_whole(x, rows, cols, shape)),
        tiles(rows, cols, shape), x.data_ptr(), 0, 0, 0, pointer(of_rows), 0, 0, 0, 0, 0, pointer(of_cols), 0, 0, rows,
        cols,
    )  # fmt: skip
    return [amaxes for amaxes in (of_rows, of_cols) if amaxes is not None]


def bind(e: Encoding) -> Encode | None:
    """Bind an encoding of matrices of one shape; amaxes that are not given are measured of the blocks. It is left to
    the reference where the first row of a shard cuts a group of 16 rows that share random bits of the column operand,
    which happens in no layer; and where the row operand is rotated, which no quantizer does."""
    (rows, cols), row, col = e.shape, e.row, e.col
    if (col is not None and col.stochastic and e.offset % DRAWN) or (row is not None and row.rht):
        return None
    macros, shape = _macros(row, col, e.measure or True in e.given)
    if col is None and e.aligned and e.held is e.dtype:
        shape = broadened(rows, cols, e.held, shape)
    job = Job((rows, cols), e.held, e.device, e.offset, e.measure, e.dispatched)
    make_row = bind_operand(row, job) if row is not None else None
    make_col = bind_operand(col, job._replace(shape=(cols, rows))) if col is not None else None
    launch = KERNELS[shape].bind(
        e.device.index or 0,
        reading(e.held, e.dtype) + macros + covering(shape, e.aligned and divides(rows, cols, shape)),
        tiles(rows, cols, shape),
    )

    def encode(x: Tensor, at: int, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        first = make_row(stats[:1] or UNKNOWN, None, seed, None) if make_row is not None else NOTHING
        second = make_col(stats[-1:] or UNKNOWN, None, seed, None) if make_col is not None else NOTHING
        launch(at, *first.parameters, *second.parameters, rows, cols)
        return first.buffers, second.buffers, (*first.measured, *second.measured)

    return encode


quantize = cached_by_shape(bind)


def bind_operand(quantizer: MXFP4Quantizer, job: Job) -> Make:
    """Decide how one operand is allocated."""
    (high, wide), empty, offset = job.shape, job.empty, job.offset
    blocks = -(-wide // GROUP)
    data, scale = fresh((high, blocks * (GROUP // 2)), torch.uint8), fresh_by_columns(high, blocks, torch.uint8)
    wanted = fresh((high, blocks), torch.float32) if job.measure else None

    def make(
        stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
    ) -> Made:
        drawn = 0 if seed is None else seed.data_ptr()
        if into is not None:
            at = (*map(Tensor.data_ptr, into), 0)[:2]  # decoded values have no scales
            return Made(into, (), (*at, 0, 0, drawn, 0))
        buffers = empty(*data), empty(*scale)
        measured = () if wanted is None else (empty(*wanted),)
        (given,) = stats
        parameters = (
            buffers[0].data_ptr(), buffers[1].data_ptr(), 0 if given is None else given.data_ptr(),
            measured[0].data_ptr() if measured else 0, drawn, offset,
        )  # fmt: skip
        return Made(buffers, measured, parameters)

    return make


def struct_of(quantizer: MXFP4Quantizer, direction: Direction, exact: bool = False) -> str:
    """The kernels' name for how an operand is made."""
    flags = [quantizer.stochastic, *([quantizer.rht] if direction == "col" else []), exact]
    words = ",".join(str(flag).lower() for flag in flags)
    return f"mxfp4::{direction.capitalize()}<mxfp4::{quantizer.scale.upper()},{words}>"


@cache
def _macros(row: MXFP4Quantizer | None, col: MXFP4Quantizer | None, stats: bool) -> tuple[tuple[str, ...], Shape]:
    """The macros that the source is compiled with, and the shape of its tiles."""
    wanted = [f"LPQ_ROW={struct_of(row, 'row')}"] if row is not None else []
    wanted += [f"LPQ_COL={struct_of(col, 'col')}"] if col is not None else []
    return (*wanted, *(["LPQ_STATS"] if stats else [])), LOW if col is None else SQUARE
