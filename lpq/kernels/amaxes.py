"""The amaxes of several fp32 matrices by one launch: of each matrix, or of each of its columns."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from lpq import registry
from lpq.kernels.launch_table import TableLaunch, bind_table, kernel_of_table, rounding
from lpq.kernels.table import ENVIRONMENT, allowed_by, why_not
from lpq.registry import KernelSpec

TILE = 128
"""Rows and columns that one block of threads takes."""
AMAXES = kernel_of_table("common/amaxes.cu", "amaxes")
SPEC = KernelSpec.cuda("amaxes", "lpq.kernels.amaxes:bind_amaxes")


def serves(device: torch.device, kernels: object) -> bool:
    """Whether the kernel may run on a device. ``kernels``: what ``kernels_allowed`` returns."""
    return _serves(device, kernels)


@registry.cached
def _serves(device: torch.device, kernels: object) -> bool:
    return why_not(SPEC, (), device, allowed_by(os.environ.get(ENVIRONMENT))) is None


def bind_amaxes(
    matrices: Sequence[tuple[int, int, tuple[int, int]]], columns: bool, dtype: torch.dtype, device: torch.device
) -> TableLaunch:
    """``matrices``: the address of each, which is contiguous, the address of its amaxes, which are zero when this is
    launched, and its shape. ``columns``: each column has an amax. ``dtype``: elements are rounded to it."""
    lines = [
        ((values, amaxes, rows, cols), -(-rows // TILE) * -(-cols // TILE)) for values, amaxes, (rows, cols) in matrices
    ]
    return bind_table(AMAXES, (*(("LPQ_COLUMNS",) if columns else ()), *rounding(dtype)), lines, device)
