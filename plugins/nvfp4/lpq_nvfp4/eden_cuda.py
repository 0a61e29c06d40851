"""MS-EDEN's CUDA kernels: one read for the amax of the matrix, and one more for an operand or, tile by
tile, for two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lpq.formats.elements import E4M3
from lpq.formats.format import Direction
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import FINISH, OUTPUTS, SQUARE, amax_finish, amax_parts, bind_amax_parts, pointer, reading
from lpq.operations.binding import Encode, Encoded, Encoding, cached_by_shape
from lpq.operations.decoding import decode_reference
from lpq.operations.exact_form import Form
from lpq.operations.fused_pair import Job, Made, Make, TileSide
from lpq.operations.measuring import measure_reference
from lpq_nvfp4.eden import ROTATED
from lpq_nvfp4.gemm import CONSTANT
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import GROUP
from lpq_nvfp4.storage import NVFP4Storage

THREADS, LINES = 256, 32
"""Threads of a block, each with 16 elements, and lines of a column operand that these take."""
DECODE = CudaKernel("nvfp4/eden_decode.cu", "decode_eden", "PPPPPqq", threads=THREADS, waits=True)
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


quantize = cached_by_shape(bind)


def decode(operand: NVFP4Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that the operand stands for."""
    rows, cols = operand.shape
    if dtype not in OUTPUTS or not rows or not cols:
        return decode_reference(operand, dtype)
    buffers = [buffer.contiguous() for buffer in operand.tensors()]
    out = buffers[0].new_empty((rows, cols), dtype=dtype)
    groups = rows * -(-cols // ROTATED)
    count = -(-groups * (ROTATED // GROUP) // THREADS)
    DECODE.launch(out.get_device(), (OUTPUTS[dtype],), count, *map(pointer, (*buffers, out)), rows, cols)
    return out


# ---------------------------------------------------------------------------------------------- tile by tile


def tile(quantizer: NVFP4Quantizer, direction: Direction) -> TileSide:
    """How an operand is made."""
    return _side(direction, bind_operand, exact=False)


def exact_tile(quantizer: NVFP4Quantizer, direction: Direction) -> TileSide:
    """How elements times the scales of their blocks are made, in bf16; the amax is their factor."""
    return _side(direction, bind_exact, exact=True)


def _side(direction: Direction, bind: Callable[[Job], Make], *, exact: bool) -> TileSide:
    col = direction == "col"
    structs = [f"eden::Operand<{str(col).lower()},{flag}>" for flag in ("false", "true")]
    return TileSide(
        csrc() / "nvfp4/eden_sides.cuh", structs[exact], "PPPPPIPq", bind, amax=True, turns=2,
        aligned=ROTATED if col else 1, decoded=None if exact else (structs[True], SQUARE),
        exact=Form(factor=True, constant=CONSTANT) if exact else None,
    )  # fmt: skip


def bind_operand(job: Job) -> Make:
    """Decide how an operand is allocated."""
    high, wide = job.shape
    blocks = -(-wide // ROTATED) * ROTATED // GROUP
    data, scale = fresh((high, blocks * (GROUP // 2)), torch.uint8), fresh((high, blocks), E4M3)
    value, number = fresh((), torch.float32), fresh((), torch.int32)
    finish = FINISH.bind(job.device.index or 0, (), 1) if job.measure else None
    empty, offset = job.empty, job.offset

    def make(
        stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
    ) -> Made:
        assert seed is not None
        if into is not None:
            assert found is not None
            at = (*map(Tensor.data_ptr, into), 0, 0, 0)[:4]  # decoded values have nothing else
            return Made(into, (), (*at, found.data_ptr(), 1, seed.data_ptr(), 0))
        buffers = empty(*data), empty(*scale), empty(*value), empty(*number)
        measured: tuple[Tensor, ...] = ()
        if finish is not None:
            assert found is not None
            measured = (empty(*value),)
            finish(found.data_ptr(), found.numel(), measured[0].data_ptr())
        return Made(buffers, measured, _parameters([*map(Tensor.data_ptr, buffers)], stats, found, seed, offset))

    return make


def bind_exact(job: Job) -> Make:
    """Decide how the exact form of an operand is allocated."""
    empty, matrix, value, offset = job.empty, fresh(job.shape, torch.bfloat16), fresh((), torch.float32), job.offset

    def make(
        stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
    ) -> Made:
        assert seed is not None
        buffers = empty(*matrix), empty(*value)
        at = [buffers[0].data_ptr(), 0, buffers[1].data_ptr(), 0]
        return Made(buffers, (), _parameters(at, stats, found, seed, offset))

    return make


def _parameters(
    at: Sequence[int], stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor, offset: int
) -> tuple[int, ...]:
    known = stats[0] if stats and stats[0] is not None else found
    assert known is not None
    return *at, known.data_ptr(), known.numel(), seed.data_ptr(), offset
