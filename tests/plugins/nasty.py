"""Inputs that formats get wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.formats.elements import unpack_nibbles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GOLDEN = ("normal", "heavy", "rowscale", "zeroblocks", "tiny", "huge", "ties", "outlier", "zero")
"""The inputs in the golden file."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Magnitudes from the smallest subnormal to the largest number, evenly in their logarithm."""
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(seed)
    low, high = torch.tensor([info.smallest_normal * info.eps, info.max], dtype=torch.float64).log2()
    magnitude = torch.exp2(low + torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low))
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (magnitude * sign).clamp(-info.max, info.max).to(dtype)


def unsigned_zeros(data: Tensor) -> Tensor:
    """Codes in which a negative zero is a zero: golden files do not pin the sign."""
    codes = unpack_nibbles(data)
    return torch.where(codes == 8, 0, codes)


def _with(value: float, dtype: torch.dtype, among: Tensor | None = None) -> Tensor:
    x = (normal(40, 130) if among is None else among).to(dtype)
    x[3, 129] = value
    return x


def values(dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices ``[40, 130]`` whose values are hard: every block of 16, 32 or 128 has a ragged edge."""
    info = torch.finfo(dtype)
    return {
        "normal": normal(40, 130, dtype=dtype),
        "wide": wide(40, 130, dtype=dtype),
        "zeros": torch.zeros(40, 130, dtype=dtype),
        "negative zeros": -torch.zeros(40, 130, dtype=dtype),
        "smallest subnormal": torch.full((40, 130), info.smallest_normal * info.eps, dtype=dtype),
        "subnormals": (normal(40, 130) * info.smallest_normal / 4).to(dtype),
        "largest": torch.full((40, 130), info.max, dtype=dtype),
        "largest beside smallest": torch.tensor([info.max, info.smallest_normal * info.eps, -info.max, 0.0])
        .to(dtype)
        .repeat(40, 33)[:, :130],
        "one element": _with(1e4, dtype, torch.zeros(40, 130)),
        "nan": _with(torch.nan, dtype),
        "inf": _with(torch.inf, dtype),
        "negative inf": _with(-torch.inf, dtype),
        "nan and inf": torch.where(wide(40, 130) > 0, torch.nan, torch.inf).to(dtype),
    }
