"""The amaxes of the rows of operands, in CUDA, for formats with a scale for each row.

A row is longer than a tile, so it is measured before it is encoded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpq.formats.format import Direction, Quantizer
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.sections import SECTIONS, Find, SectionedMatrix, bind_zeros
from lpq.kernels.table import bound_once
from lpq.kernels.tiles import TALL, ZERO, covering, divides, reading, tile_kernels, tiles
from lpq.operations.binding import ALIGNED, Encoding, on_device

LINES = tile_kernels("common/lines.cu", "amax", "PPP")[TALL]
LINES_IN_SECTIONS = tile_kernels("common/lines.cu", "amax", f"PPP{SECTIONS}")[TALL]


def bind_amaxes_of_lines(e: Encoding) -> Callable[[int], list[Tensor]]:
    """A function that finds the amaxes of the rows of the wanted operands."""
    rows, cols = e.shape
    index, empty = e.device.index or 0, allocator(e.device, dispatched=e.dispatched)
    counts = [size for side, size in ((e.row, rows), (e.col, cols)) if side is not None]
    memory = [fresh((count, 1), torch.float32) for count in counts]
    zero = ZERO.bind(index, (), -(-max(counts) // ZERO.threads))
    whole = e.aligned and divides(rows, cols, TALL)
    launch = LINES.bind(index, reading(e.held, e.dtype) + covering(TALL, whole), tiles(rows, cols, TALL))
    has_row, has_col = e.row is not None, e.col is not None

    def find(at: int) -> list[Tensor]:
        amaxes = [empty(*m) for m in memory]
        first, last = amaxes[0].data_ptr(), amaxes[-1].data_ptr()
        zero(first, counts[0], last, counts[-1])
        launch(at, first if has_row else 0, last if has_col else 0, rows, cols)
        return amaxes

    return find


_bind_few = bound_once(bind_amaxes_of_lines)


def measure_lines(x: Tensor, row: Quantizer | None, col: Quantizer | None, dtype: torch.dtype) -> list[Tensor]:
    """The amaxes of the rows of the wanted operands."""
    (rows, cols), at = x.shape, x.data_ptr()
    e = Encoding(row, col, (rows, cols), x.dtype, dtype, x.device, aligned=at % ALIGNED == 0, dispatched=True)
    with on_device(x.device):
        return _bind_few(e)(at)


def find_in_sections(sections: SectionedMatrix, direction: Direction, amax: bool, both: bool) -> tuple[Find, bool]:
    """A function that finds the amaxes of the rows of an operand, or of both, of each section."""
    sizes = {"row": sections.rows, "col": sections.number * sections.cols}
    other: Direction = "col" if direction == "row" else "row"
    directions = (direction, other) if both else (direction,)
    zeros = bind_zeros(sections, *(sizes[d] for d in directions))
    launch = LINES_IN_SECTIONS.bind(sections.device.index or 0, sections.macros(TALL), sections.tiles(TALL))
    tail = *sections.arguments(0)[1:], sections.rows, sections.cols

    def find(at: int, ends: int) -> tuple[Tensor, Tensor | None]:
        amaxes = dict(zip(directions, zeros(), strict=True))
        to = [amaxes[d].data_ptr() if d in amaxes else 0 for d in ("row", "col")]
        launch(at, *to, ends, *tail)
        return amaxes[direction], amaxes.get(other)

    return find, both
