"""FP8 tile by tile, for operands that are written together with an operand of another format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.formats.format import Direction
from lpq.kernels.fresh import fresh
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import SQUARE, TALL
from lpq.operations.binding import Encoding
from lpq.operations.fused_pair import Job, Look, Made, Make, TileSide
from lpq.operations.line_amaxes import bind_amaxes_of_lines, find_in_sections
from lpq_fp8.cuda import BLOCK, fresh_scales
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.reference import ELEMENTS


def tile(quantizer: FP8Quantizer, direction: Direction) -> TileSide:
    """How either operand is made."""
    return (_matrix if quantizer.transposable else _lines)(quantizer, direction)


def _matrix(quantizer: FP8Quantizer, direction: Direction) -> TileSide:
    """One scale, or one for each 128x128."""
    square, element = quantizer.scaling == "block", ELEMENTS[quantizer.dtype]

    def bind(job: Job) -> Make:
        high, wide = job.shape
        grid = (-(-high // BLOCK), -(-wide // BLOCK)) if square else ()
        empty, data, scale = job.empty, fresh(job.shape, element), fresh(grid, torch.float32)
        tail = quantizer.largest_scale(job.dtype), quantizer.pow2_scales
        by_product = job.measure and not square

        def make(
            stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
        ) -> Made:
            if into is not None:
                scales = into[1].data_ptr() if len(into) > 1 else 0  # decoded values have none
                amax = 0 if found is None else found.data_ptr()
                return Made(into, (), (into[0].data_ptr(), scales, amax, 1, 0, 0, *tail))
            (given,) = stats
            buffers = empty(*data), empty(*scale)
            amaxes = given if given is not None else found
            known = measured = at = count = 0
            wanted = [empty(*scale)] if job.measure else []
            if job.measure and (square or given is not None):
                measured = wanted[0].data_ptr()
            elif job.measure:
                known = wanted[0].data_ptr()
            if amaxes is not None:
                at, count = amaxes.data_ptr(), amaxes.numel()
            parameters = buffers[0].data_ptr(), buffers[1].data_ptr(), at, count, known, measured, *tail
            return Made(buffers, wanted, parameters, measured if by_product else 0)

        return make

    struct = f"fp8::{direction.capitalize()}Matrix<{quantizer.dtype.upper()},{str(square).lower()}"
    return TileSide(
        csrc() / "fp8/matrix.cuh", f"{struct}>", "PPPIPPfI", bind, amax=not square, by_product=True, shape=TALL,
        decoded=(f"{struct},true>", SQUARE),
    )  # fmt: skip


def _lines(quantizer: FP8Quantizer, direction: Direction) -> TileSide:
    """A scale for each line of the operand, or for 128 elements of one."""
    blocks, element = quantizer.scaling == "block", ELEMENTS[quantizer.dtype]

    def find(e: Encoding, amax: bool) -> Look:
        row, col = (quantizer, None) if direction == "row" else (None, quantizer)
        amaxes = bind_amaxes_of_lines(e._replace(row=row, col=col))
        return lambda at: (amaxes(at)[0], None)

    def bind(job: Job) -> Make:
        high, wide = job.shape
        empty, data, scale = job.empty, fresh(job.shape, element), fresh_scales(high, wide, blocks)
        amaxes = fresh(scale[0], torch.float32) if blocks and job.measure else None
        tail = quantizer.largest_scale(job.dtype), quantizer.pow2_scales

        def make(
            stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
        ) -> Made:
            if into is not None:
                scales = into[1].data_ptr() if len(into) > 1 else 0  # decoded values have none
                return Made(into, (), (into[0].data_ptr(), scales, 0 if found is None else found.data_ptr(), 0, *tail))
            (given,) = stats
            buffers = empty(*data), empty(*scale)
            measured = None if amaxes is None else empty(*amaxes)
            known = given if given is not None else found
            parameters = (
                buffers[0].data_ptr(), buffers[1].data_ptr(), 0 if known is None else known.data_ptr(),
                0 if measured is None else measured.data_ptr(), *tail,
            )  # fmt: skip
            wanted = (measured if blocks else found) if job.measure else None
            return Made(buffers, () if wanted is None else (wanted,), parameters)

        return make

    flags = [blocks, blocks and quantizer.pow2_scales]
    options = ",".join([quantizer.dtype.upper(), *(str(f).lower() for f in flags)])
    struct = f"fp8::{direction.capitalize()}Lines<{options}"
    return TileSide(
        csrc() / "fp8/lines.cuh", f"{struct}>", "PPPPfI", bind, find=None if blocks else find, shape=TALL,
        lines="" if blocks else f"{direction.capitalize()}Amaxes",
        finder=None if blocks else find_in_sections, decoded=(f"{struct},true>", SQUARE),
    )  # fmt: skip
