"""MS-EDEN's CUDA kernels: one read for the amax of the matrix, and one more for each operand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.formats.elements import E4M3
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.tiles import FINISH, amax_finish, amax_parts, bind_amax_parts, reading
from lpq.operations.binding import Encode, Encoded, Encoding, unbound
from lpq.operations.measuring import measure_reference
from lpq_nvfp4.eden import ROTATED
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import GROUP

THREADS, LINES = 256, 32
"""Threads of a block, each with 16 elements, and lines of a column operand that these take."""
ENCODE = CudaKernel("nvfp4/eden.cu", "encode_eden", "PPPPPPIPqqq", threads=THREADS, waits=True)


def measure(
    x: Tensor, row: NVFP4Quantizer | None, col: NVFP4Quantizer | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The amax of the matrix."""
    dtype = dtype or x.dtype
    if x.numel() == 0:
        return measure_reference(x.to(dtype), row, col)
    return [amax_finish(amax_parts(x.contiguous(), dtype))]


def bind(e: Encoding) -> Encode | None:
    """Bind an encoding of matrices of one shape. It is left to the reference where the first row of a shard cuts a
    group of rows that are rotated together in the column operand, which happens in no layer."""
    (rows, cols), index, offset = e.shape, e.device.index or 0, e.offset
    if e.row is None and offset % ROTATED:
        return None
    high, wide = (rows, cols) if e.col is None else (cols, rows)
    groups = -(-wide // ROTATED)
    blocks = groups * ROTATED // GROUP
    count = -(-high * blocks // THREADS) if e.col is None else groups * -(-high // LINES)
    macros = (*reading(e.held, e.dtype), *([] if e.col is None else ["LPQ_COL"]))
    launch, empty = ENCODE.bind(index, macros, count), allocator(e.device, dispatched=e.dispatched)
    given = True in e.given
    memory, measure_amax = bind_amax_parts(e.held, e.dtype, rows * cols, e.device)
    finish = FINISH.bind(index, (), 1) if e.measure else None
    data, scale = fresh((high, blocks * (GROUP // 2)), torch.uint8), fresh((high, blocks), E4M3)
    value, number = fresh((), torch.float32), fresh((), torch.int32)

    def encode(x: Tensor, at: int, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        assert seed is not None
        known = stats[0] if given else None
        found: Tensor | None = None
        if known is None or finish is not None:
            found = empty(*memory)
            measure_amax(at, found.data_ptr())
        measured: tuple[Tensor, ...] = ()
        if finish is not None and found is not None:
            measured = (empty(*value),)
            finish(found.data_ptr(), found.numel(), measured[0].data_ptr())
        amaxes = known if known is not None else found
        assert amaxes is not None
        buffers = empty(*data), empty(*scale), empty(*value), empty(*number)
        launch(
            at, *(buffer.data_ptr() for buffer in buffers), amaxes.data_ptr(), amaxes.numel(), seed.data_ptr(), offset,
            rows, cols,
        )  # fmt: skip
        return (buffers, (), measured) if e.col is None else ((), buffers, measured)

    return encode


quantize = unbound(bind)
