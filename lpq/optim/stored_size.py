"""The bytes of an optimizer's state in a format, and which states are stored in one. The decision follows from the
shape of the whole tensor, so that all ranks decide alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lpq.formats import Quantizer
from lpq.operations.inputs import DTYPES

LEAST = 4096
"""The number of elements that a state has at least to be stored in a format."""


def is_large(shape: Sequence[int], least: int = LEAST) -> bool:
    """Whether a state of this shape may be stored in a format."""
    return len(shape) > 1 and math.prod(shape) >= least


def stored_bytes(quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of a state of this shape, or of a shard of one, in a format."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    return sum(math.prod(b.grid(rows, cols)) * (b.dtype or dtype).itemsize for b in quantizer.layout)


def why_stays(quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, least: int = LEAST) -> str | None:
    """Why a state of this shape is not stored in a format; None if it is."""
    if not is_large(shape, least):
        return f"it is a vector, or has fewer than {least} elements"
    if dtype not in DTYPES:
        return f"it is of {dtype}, which lpq does not encode"
    smaller = stored_bytes(quantizer, shape, dtype) < math.prod(shape) * dtype.itemsize
    return None if smaller else "it would not be smaller"
