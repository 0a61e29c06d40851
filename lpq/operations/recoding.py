"""Column operands that are made of row operands, by one kernel: the values of the codes are encoded as they are read.

A format says how its codes are read, by a kernel for ``reader``, and how a column operand is made tile by tile, by one
for ``tile``. Any two such formats go together, if the second needs no statistic beforehand. Encoding the
decoded row operand gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Quantizer
from lpq.kernels.table import bound_once, optional
from lpq.kernels.tiles import INPUTS, covering, divides, tile_kernels, tiles
from lpq.operations.binding import ALIGNED, Operand
from lpq.operations.fused_pair import Job, TileSide, side_of

Recode = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""``recode(buffers)``, on the current device: buffers of the row operand in, and of the column operand out."""


class CodeReader(NamedTuple):
    """How the codes of an operand are read."""

    header: Path
    """The header that has the struct."""
    struct: str
    """The struct, with its template arguments. Its ``each_line(tile, use)`` calls ``use(i, v)`` for each of a thread's
    lines in the matrix, with eight values in fp32."""
    parameters: str
    """A letter for each of its fields, as for ``CudaKernel``."""
    fields: Callable[[Sequence[Tensor]], Sequence[float]]
    """The fields, of the buffers of an operand. Its codes are contiguous."""


@bound_once
def bind_recode(row: Operand, col: Quantizer, device: torch.device) -> Recode | None:
    """Bind the kernel that makes the column operand of a matrix of its row operand; None where there is none."""
    is_matrix = len(row.shape) == 2 and row.sections is None and row.form is None
    if device.type != "cuda" or not is_matrix or 0 in row.shape:
        return None
    impl, side = optional("reader", row.quantizer, device), side_of(col, "col", device)
    if isinstance(impl, str) or isinstance(side, str):
        return None
    return bind_sides(impl(row.quantizer), side, row, col, device)


def bind_sides(reader: CodeReader, side: TileSide, row: Operand, col: Quantizer, device: torch.device) -> Recode | None:
    """Bind the kernel of a reader and of a column operand's side; None if that
    must know a statistic beforehand, or either is rotated."""
    rotated = row.quantizer.rotation is not None or col.rotation is not None
    if side.amax or side.find is not None or col.stochastic or rotated:
        return None
    rows, cols = row.shape
    make, none = side.bind(Job((cols, rows), torch.float32, device)), (None,) * len(col.stats)
    shape = min(side.shape, side.least)  # codes are small: more blocks at a time read faster than tall tiles
    kernel = tile_kernels("common/recode.cu", "recode", f"({reader.parameters})({side.parameters})")[shape]
    macros = (
        INPUTS[torch.float32], f"LPQ_READER={reader.struct}", f'LPQ_READER_HEADER="{reader.header}"',
        f"LPQ_COL={side.struct}", f'LPQ_COL_HEADER="{side.header}"',
        *covering(shape, divides(rows, cols, shape)),
    )  # fmt: skip
    launch, fields = kernel.bind(device.index or 0, macros, tiles(rows, cols, shape)), reader.fields

    def recode(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        codes, *scales = buffers
        if codes.data_ptr() % ALIGNED or not codes.is_contiguous():
            codes = codes.clone(memory_format=torch.contiguous_format)
        output = make(none, None, None, None)
        launch(*fields((codes, *scales)), *output.parameters, rows, cols)
        return output.buffers

    return recode
