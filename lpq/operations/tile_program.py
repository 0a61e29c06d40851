"""How a program in Triton makes one operand of a format, tile by tile, of elements that it has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lpq.formats.format import Direction, Quantizer
from lpq.kernels.table import NO_KERNEL, optional


class TileProgram(NamedTuple):
    """The functions of a format that measure and encode a tile of one operand, in Triton.

    Both are given the elements in fp32, zero outside of the matrix; the tile's first row and column, and the rows and
    columns of the operand. ``options`` come last."""

    write: Any
    """``write(values, row, col, rows, cols, buffers, stats, seed, offset, OPTIONS)``: it encodes as the reference does.
    ``buffers`` come in the order of the layout, 8-bit floats as bytes, in the memory order of a fresh operand.
    ``stats`` are the statistics, None where the tile itself is measured; ``seed`` may be None. ``offset`` is the first
    row of the matrix in the whole tensor."""
    measure: Any
    """``measure(values, row, col, rows, cols, measured, OPTIONS)``: it writes statistics to ``measured``, None where
    one is not wanted. fp32 comes as int32 with the same bits, and zeros where a block may be of several tiles, as
    ``lpq.kernels.triton.tiles.measure_tile`` needs it."""
    options: tuple[bool | int | float, ...]
    """The options of the quantizer, as both functions read them."""
    before: tuple[bool, ...]
    """For each statistic, whether ``write`` needs it of the whole matrix before the first element."""
    block: tuple[int, int] = (1, 1)
    """The rows and columns of a block of the operand, powers of two: a tile has whole blocks."""
    aligned: int = 1
    """Only matrices whose first row in the whole tensor is a multiple of this are encoded so."""


def tile_program(
    quantizer: Quantizer, direction: Direction, dtype: torch.dtype, device: torch.device
) -> TileProgram | str:
    """The functions for an operand of a matrix in this dtype, or why there are none."""
    impl = optional("tile_program", quantizer, device)
    program: TileProgram | str | None = impl if isinstance(impl, str) else impl(quantizer, direction, dtype)
    if isinstance(program, TileProgram):
        return program
    return f"{quantizer} has no {direction} operand tile by tile in Triton: {program or NO_KERNEL}"
