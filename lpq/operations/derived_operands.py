"""Properties that follow from both sides of a quantizer: whether it encodes with random bits, and whether the column
operand follows from the row operand, so that only one of the two is kept or sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lpq.formats.format import Storage
from lpq.operations.decoding import decode
from lpq.operations.quantizing import quantize
from lpq.operations.transposing import transpose

if TYPE_CHECKING:
    from lpq.formats.format import Quantizer


def rounds_stochastically(quantizer: Quantizer) -> bool:
    """Whether either operand is rounded with random bits."""
    return quantizer.side("row").stochastic or quantizer.side("col").stochastic


def derives_col(quantizer: Quantizer) -> bool:
    """Whether the column operand follows from the row operand alone."""
    row = quantizer.side("row")
    return quantizer.col_source == "row" or (row.transposable and quantizer.side("col") == row)


def derive_col(quantizer: Quantizer, row: Storage) -> Storage:
    """The column operand that follows from the row operand: its transpose, or an encoding of what it decodes to."""
    if quantizer.col_source == "original":
        return transpose(row)
    _, col, _ = quantize(decode(row, torch.float32), None, None, quantizer.side("col"))
    assert col is not None
    return col.astype(row.dtype)  # it stands for the tensor, not for what was decoded
