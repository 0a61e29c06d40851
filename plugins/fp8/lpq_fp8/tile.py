"""FP8 tile by tile, for operands that are written beside those of another format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.formats.format import Direction
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.tiles import SQUARE, TALL, pointer
from lpq.operations.fused_pair import Job, Made, TileSide
from lpq_fp8.cuda import BLOCK, find_in_sections, measure_lines, scales_of
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.reference import ELEMENTS


def tile(quantizer: FP8Quantizer, direction: Direction) -> TileSide:
    """How either operand is made."""
    return (_matrix if quantizer.transposable else _lines)(quantizer, direction)


def _matrix(quantizer: FP8Quantizer, direction: Direction) -> TileSide:
    """One scale, or one for each 128x128."""
    square, element = quantizer.scaling == "block", ELEMENTS[quantizer.dtype]

    def make(job: Job) -> Made:
        high, wide = job.shape
        grid = (-(-high // BLOCK), -(-wide // BLOCK)) if square else ()
        (given,) = job.stats
        tail = quantizer.largest_scale(job.x.dtype), quantizer.pow2_scales
        if job.into is not None:
            return Made(job.into, (), (*_pointers(job.into), pointer(job.found), 1, 0, 0, *tail))
        data, scale = job.x.new_empty(job.shape, dtype=element), job.x.new_empty(grid, dtype=torch.float32)
        amaxes = given if given is not None else job.found
        known = measured = None
        if job.measure and square:
            measured = torch.empty_like(scale)
        elif job.measure and given is not None:  # a by-product
            measured = torch.zeros_like(scale)
        elif job.measure:
            known = torch.empty_like(scale)
        parameters = (
            data.data_ptr(), scale.data_ptr(), pointer(amaxes), amaxes.numel() if amaxes is not None else 0,
            pointer(known), pointer(measured), *tail,
        )  # fmt: skip
        return Made((data, scale), [t for t in (known, measured) if t is not None], parameters)

    struct = f"fp8::{direction.capitalize()}Matrix<{quantizer.dtype.upper()},{str(square).lower()}"
    return TileSide(
        csrc() / "fp8/matrix.cuh", f"{struct}>", "PPPIPPfI", make, amax=not square, by_product=True, shape=TALL,
        decoded=(f"{struct},true>", SQUARE),
    )  # fmt: skip


def _lines(quantizer: FP8Quantizer, direction: Direction) -> TileSide:
    """A scale for each line of the operand, or for 128 elements of one."""
    blocks, element = quantizer.scaling == "block", ELEMENTS[quantizer.dtype]

    def find(x: Tensor, amax: bool) -> tuple[Tensor, Tensor | None]:
        row, col = (quantizer, None) if direction == "row" else (None, quantizer)
        return measure_lines(x, row, col, x.dtype)[0], None

    def make(job: Job) -> Made:
        high, wide = job.shape
        tail = quantizer.largest_scale(job.x.dtype), quantizer.pow2_scales
        if job.into is not None:
            return Made(job.into, (), (*_pointers(job.into), pointer(job.found), 0, *tail))
        data = job.x.new_empty(job.shape, dtype=element)
        scale = scales_of(job.x, high, wide, blocks)
        (given,) = job.stats
        measured = job.x.new_empty(scale.shape, dtype=torch.float32) if blocks and job.measure else None
        parameters = (
            data.data_ptr(), scale.data_ptr(), pointer(given if given is not None else job.found), pointer(measured),
            *tail,
        )  # fmt: skip
        wanted = (measured if blocks else job.found) if job.measure else None
        return Made((data, scale), () if wanted is None else (wanted,), parameters)

    flags = [blocks, blocks and quantizer.pow2_scales]
    options = ",".join([quantizer.dtype.upper(), *(str(f).lower() for f in flags)])
    struct = f"fp8::{direction.capitalize()}Lines<{options}"
    return TileSide(
        csrc() / "fp8/lines.cuh", f"{struct}>", "PPPPfI", make, find=None if blocks else find, shape=TALL,
        finder=None if blocks else find_in_sections, decoded=(f"{struct},true>", SQUARE),
    )  # fmt: skip


def _pointers(buffers: Sequence[Tensor]) -> tuple[int, int]:
    """Those of elements and scales; there are no scales of what is decoded."""
    return buffers[0].data_ptr(), buffers[1].data_ptr() if len(buffers) > 1 else 0
