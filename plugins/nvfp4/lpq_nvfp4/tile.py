"""NVFP4 tile by tile: operands that are written beside others, or that are made for a product without being encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpq.formats.format import Direction
from lpq.kernels.fresh import fresh
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.sections import SECTIONS, Find, SectionedMatrix, bind_zeros
from lpq.kernels.tiles import SQUARE, tile_kernels
from lpq.operations.binding import Encoding
from lpq.operations.exact_form import Form
from lpq.operations.fused_pair import Job, Look, Made, Make, TileSide
from lpq.operations.line_amaxes import bind_amaxes_of_lines
from lpq.operations.line_amaxes import find_in_sections as find_lines_in_sections
from lpq_nvfp4.cuda import bind_operand, bind_rotated_parts, way
from lpq_nvfp4.gemm import CONSTANT
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import GROUP

AMAXES = tile_kernels("nvfp4/section_amaxes.cu", "section_amaxes", f"PPP{SECTIONS}")[SQUARE]


def tile(quantizer: NVFP4Quantizer, direction: Direction) -> TileSide | None:
    """How an operand is made; none that is rotated is a row operand."""
    if quantizer.rht and direction == "row":
        return None
    bind = partial(bind_operand, quantizer)
    return _side(quantizer, direction, bind, decoded=(_struct(quantizer, direction, True), SQUARE))


def exact_tile(quantizer: NVFP4Quantizer, direction: Direction) -> TileSide | None:
    """How elements times the scales of their blocks are made, in bf16; the amax is their factor. Operands with an amax
    for each row are encoded first."""
    if (quantizer.rht and direction == "row") or quantizer.scaling == "row":
        return None

    def bind(job: Job) -> Make:
        empty, memory, value, offset = job.empty, fresh(job.shape, torch.bfloat16), fresh((), torch.float32), job.offset

        def make(
            stats: Sequence[Tensor | None], found: Tensor | None, seed: Tensor | None, into: Sequence[Tensor] | None
        ) -> Made:
            assert found is not None
            matrix, amax = empty(*memory), empty(*value)
            parameters = (
                matrix.data_ptr(), 0, amax.data_ptr(), found.data_ptr(), found.numel(), 0, 0,
                0 if seed is None else seed.data_ptr(), offset,
            )  # fmt: skip
            return Made((matrix, amax), (), parameters)

        return make

    return _side(quantizer, direction, bind, exact=Form(factor=True, constant=CONSTANT))


def _struct(quantizer: NVFP4Quantizer, direction: Direction, exact: bool) -> str:
    flags = quantizer.block == "16x16", direction == "col" and quantizer.rht, exact
    return f"nvfp4::{direction.capitalize()}<{way(quantizer)},{','.join(str(flag).lower() for flag in flags)}>"


def _side(quantizer: NVFP4Quantizer, direction: Direction, bind: Callable[[Job], Make], **rest: Any) -> TileSide:
    aligned = GROUP if quantizer.stochastic and direction == "col" else 1
    found: dict[str, Any] = {"amax": True}
    if quantizer.scaling == "row":
        lines = f"{direction.capitalize()}Amaxes"
        found = {"find": partial(_lines, quantizer, direction), "finder": find_lines_in_sections, "lines": lines}
    elif quantizer.rht:
        found = {"find": bind_rotated_parts, "finder": find_in_sections}
    return TileSide(
        csrc() / "nvfp4/sides.cuh", _struct(quantizer, direction, "exact" in rest), "PPPPIPPPq", bind, turns=2,
        aligned=aligned, **found, **rest,
    )  # fmt: skip


def _lines(quantizer: NVFP4Quantizer, direction: Direction, e: Encoding, amax: bool) -> Look:
    row, col = (quantizer, None) if direction == "row" else (None, quantizer)
    amaxes = bind_amaxes_of_lines(e._replace(row=row, col=col))
    return lambda at: (amaxes(at)[0], None)


def find_in_sections(sections: SectionedMatrix, direction: Direction, amax: bool, both: bool) -> tuple[Find, bool]:
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
