"""Sections on the host (``csrc/common/sections.cuh``): rows that are encoded by themselves, in one launch.

They are groups of rows, whose ends are in a tensor on the device, or the matrices of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.tiles import INPUTS, MANY_BLOCKS, TALL, ZERO, Shape, covering, tile_kernels
from lpq.registry import KernelSpec

SECTIONS = "(PIqIq)"
"""The letters of the kernels' argument ``Sections``."""
MACRO = "LPQ_SECTIONS"
AMAXES = tile_kernels("common/sections.cu", "section_amaxes", f"PP{SECTIONS}")
PAD_ENDS = CudaKernel("common/sections.cu", "pad_ends", "PPqq", threads=32, waits=True)
CLEAR_ROWS = CudaKernel("common/sections.cu", "clear_rows", "PPqqq", threads=256, waits=True)
CLEAR_MATRICES = CudaKernel("common/sections.cu", "clear_matrices", "PPqq", threads=256, waits=True)

Find = Callable[[int, int], tuple[Tensor, Tensor | None]]
"""``find(x, ends)``, of two addresses: the statistics for one operand and, if wanted, for the other."""


class SectionedMatrix(NamedTuple):
    """A matrix in sections, for kernels of one shape."""

    rows: int
    cols: int
    number: int
    tall: int | None
    """The rows of each matrix of a stack; None: groups of any sizes, which may leave rows behind them."""
    unit: int
    """A group is padded to a multiple of this number of rows in a column operand."""
    line: int
    """The length of a line of the column operand."""
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True
    """Whether the matrix begins at a multiple of 16 bytes."""

    def arguments(self, ends: int) -> tuple[int, ...]:
        """The arguments of kernels; ``ends``: where the ends of the groups lie, 0 for a stack."""
        return ends, self.number, self.tall or 0, self.unit, self.line

    def tiles(self, shape: Shape) -> int:
        """The number of tiles that suffices for groups of any sizes: each has at least one."""
        if self.tall is None:
            down = self.rows // shape.tall + self.number
        else:
            down = self.number * max(-(-self.tall // shape.tall), 1)
        return down * -(-self.cols // shape.wide)

    def macros(self, shape: Shape) -> tuple[str, ...]:
        """The macros of the input and of tiles of this shape."""
        whole = self.tall is not None and not (self.tall % shape.tall or self.cols % shape.wide) and self.aligned
        return INPUTS[self.dtype], MACRO, *covering(shape, whole)


def bind_zeros(sections: SectionedMatrix, *counts: int) -> Callable[[], list[Tensor]]:
    """Bind a function that makes one or two vectors of zeros (fp32), in which a kernel finds largest magnitudes."""
    index, empty = sections.device.index or 0, allocator(sections.device)
    memory = [fresh((count,), torch.float32) for count in counts]
    launch = ZERO.bind(index, (), -(-max(counts) // ZERO.threads))

    def make() -> list[Tensor]:
        out = [empty(*m) for m in memory]
        launch(out[0].data_ptr(), counts[0], out[-1].data_ptr(), counts[-1])
        return out

    return make


def bind_amaxes(sections: SectionedMatrix) -> Find:
    """Bind a function that finds the amax of each section."""
    zeros = bind_zeros(sections, sections.number)
    shape, index = TALL, sections.device.index or 0
    launch = AMAXES[shape].bind(index, sections.macros(shape), sections.tiles(shape))
    tail = *sections.arguments(0)[1:], sections.rows, sections.cols

    def find(at: int, ends: int) -> tuple[Tensor, Tensor | None]:
        (found,) = zeros()
        launch(at, found.data_ptr(), ends, *tail)
        return found, None

    return find


NEEDS = KernelSpec.cuda("tile", "lpq.kernels.sections:bind_clear_rows")
"""The kernels of the functions below."""


def bind_pad_ends(unit: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Bind a function of the ends of groups: where each ends if groups are padded to multiples of ``unit``
    lines."""
    launch = PAD_ENDS.bind(device.index or 0, (), 1)

    def pad_ends(offs: Tensor) -> Tensor:
        out = torch.empty_like(offs)
        launch(offs.data_ptr(), out.data_ptr(), len(offs), unit)
        return out

    return pad_ends


def bind_clear_rows(device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Bind a function of a matrix and the ends of groups that sets the rows behind the last group to zero."""
    launch = CLEAR_ROWS.bind(device.index or 0, (), MANY_BLOCKS)

    def clear_rows(out: Tensor, offs: Tensor) -> None:
        launch(out.data_ptr(), offs.data_ptr(), len(offs), out.shape[0], out.stride(0) * out.itemsize)

    return clear_rows


def bind_clear_matrices(device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Bind a function of a stack and the ends of groups that sets the matrices of groups without rows to zero."""
    launch = CLEAR_MATRICES.bind(device.index or 0, (), MANY_BLOCKS)

    def clear_matrices(out: Tensor, offs: Tensor) -> None:
        launch(out.data_ptr(), offs.data_ptr(), len(offs), out.stride(0) * out.itemsize)

    return clear_matrices
