"""Decode an operand and leave its rotation where it is."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.formats.format import Storage
from lpq.operations.decoding import decode


def decode_rotated(operand: Storage, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix that ``Storage.decode_rotated`` does, rounded once to ``dtype``. Where the format declares
    ``without_rotation``, its kernels decode the operand."""
    quantizer, (_, cols) = operand.quantizer, operand.shape
    alike = quantizer.without_rotation if quantizer.whole(cols) else None
    if alike is not None:
        operand = operand.from_tensors(operand.tensors(), alike, operand.shape, operand.dtype)
    return decode(operand, dtype) if operand.quantizer.basis is None else operand.decode_rotated().to(dtype)
