"""NVFP4 tile by tile: operands that are written beside others, or that are made for a product without being encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lpq.formats.format import Direction
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.sections import SECTIONS, Find, Sections, bind_zeros
from lpq.kernels.tiles import SQUARE, amax_finish, pointer, tile_kernels
from lpq.operations.exact_form import Form
from lpq.operations.fused_pair import Job, Made, TileSide
from lpq_nvfp4.cuda import fresh, parts_of
from lpq_nvfp4.gemm import CONSTANT
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import GROUP

AMAXES = tile_kernels("nvfp4/section_amaxes.cu", "section_amaxes", f"PPP{SECTIONS}")[SQUARE]


def tile(quantizer: NVFP4Quantizer, direction: Direction) -> TileSide | None:
    """How an operand is made; none that is rotated is a row operand."""
    if quantizer.rht and direction == "row":
        return None

    def make(job: Job) -> Made:
        amax, given = job.stats
        if job.into is not None:
            assert job.found is not None
            at = (*map(pointer, job.into), 0, 0)[:3]  # there are no scales of what is decoded
            rest = job.found.data_ptr(), 1, 0, 0, pointer(job.seed), 0
            return Made(job.into, (), (*at, *rest))
        buffers = fresh(job.x, quantizer, *job.shape)
        measured: tuple[Tensor, ...] = ()
        if job.measure:
            assert job.found is not None
            measured = (amax_finish(job.found), job.x.new_empty(buffers[1].shape, dtype=torch.float32))
        known = amax if amax is not None else job.found
        assert known is not None
        parameters = (
            buffers[0].data_ptr(), buffers[1].data_ptr(), buffers[2].data_ptr(), known.data_ptr(), known.numel(),
            0 if given is None else given.data_ptr(), measured[1].data_ptr() if measured else 0,
            0 if job.seed is None else job.seed.data_ptr(), job.offset,
        )  # fmt: skip
        return Made(buffers, measured, parameters)

    return _side(quantizer, direction, make, decoded=(_struct(quantizer, direction, True), SQUARE))


def exact_tile(quantizer: NVFP4Quantizer, direction: Direction) -> TileSide | None:
    """The same of elements times the scales of their blocks, in bf16, and the amax as their factor."""
    if quantizer.rht and direction == "row":
        return None

    def make(job: Job) -> Made:
        assert job.found is not None
        matrix, amax = job.x.new_empty(job.shape, dtype=torch.bfloat16), job.x.new_empty((), dtype=torch.float32)
        parameters = (
            matrix.data_ptr(), 0, amax.data_ptr(), job.found.data_ptr(), job.found.numel(), 0, 0,
            0 if job.seed is None else job.seed.data_ptr(), job.offset,
        )  # fmt: skip
        return Made((matrix, amax), (), parameters)

    return _side(quantizer, direction, make, exact=Form(factor=True, constant=CONSTANT))


def _struct(quantizer: NVFP4Quantizer, direction: Direction, exact: bool) -> str:
    flags = quantizer.stochastic, quantizer.block == "16x16", direction == "col" and quantizer.rht, exact
    return f"nvfp4::{direction.capitalize()}<{','.join(str(flag).lower() for flag in flags)}>"


def _side(quantizer: NVFP4Quantizer, direction: Direction, make: Callable[[Job], Made], **rest: Any) -> TileSide:
    aligned = GROUP if quantizer.stochastic and direction == "col" else 1
    find = _rotated if quantizer.rht else None
    return TileSide(
        csrc() / "nvfp4/sides.cuh", _struct(quantizer, direction, "exact" in rest), "PPPPIPPPq", make,
        amax=find is None, find=find, finder=None if find is None else find_in_sections, turns=2, aligned=aligned,
        **rest,
    )  # fmt: skip


def _rotated(x: Tensor, plain: bool) -> tuple[Tensor, Tensor | None]:
    """Magnitudes of which the largest is the amax of the rotated columns; and of the matrix, if that is wanted."""
    of_plain, rotated = parts_of(x, x.dtype, plain, True)
    assert rotated is not None
    return rotated, of_plain


def find_in_sections(sections: Sections, direction: Direction, amax: bool, both: bool) -> tuple[Find, bool]:
    """A function that finds the amax of the rotated columns of each section; and its amax, if that is wanted."""
    zeros = bind_zeros(sections, *[sections.number] * (1 + amax))
    launch = AMAXES.bind(sections.device.index or 0, sections.macros(SQUARE), sections.tiles(SQUARE))

    def find(at: int, ends: int) -> tuple[Tensor, Tensor | None]:
        rotated, *plain = zeros()
        launch(
            at, plain[0].data_ptr() if plain else 0, rotated.data_ptr(), *sections.arguments(ends), sections.rows,
            sections.cols,
        )  # fmt: skip
        return rotated, plain[0] if plain else None

    return find, amax
