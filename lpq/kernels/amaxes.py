"""The amaxes of several fp32 matrices by one launch: of each matrix, or of each of its columns or rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from lpq.kernels.launch_table import TableLaunch, bind_table, kernel_of_table, rounding
from lpq.registry import KernelSpec

TILE = 128
"""Rows and columns that one block of threads takes."""
AMAXES = kernel_of_table("common/amaxes.cu", "amaxes")
Of = Literal["matrix", "column", "row"]
"""The parts of a matrix that have an amax each."""
MACROS: dict[Of, tuple[str, ...]] = {"matrix": (), "column": ("LPQ_COLUMNS",), "row": ("LPQ_LINES",)}
SPEC = KernelSpec.cuda("amaxes", "lpq.kernels.amaxes:bind_amaxes")


def bind_amaxes(
    matrices: Sequence[tuple[int, int, tuple[int, int]]], of: Of, dtype: torch.dtype, device: torch.device
) -> TableLaunch:
    """``matrices``: the address of each, which is contiguous, the address of its amaxes, which are zero when this is
    launched, and its shape. ``dtype``: elements are rounded to it."""
    lines = [
        ((values, amaxes, rows, cols), -(-rows // TILE) * -(-cols // TILE)) for values, amaxes, (rows, cols) in matrices
    ]
    return bind_table(AMAXES, (*MACROS[of], *rounding(dtype)), lines, device)
