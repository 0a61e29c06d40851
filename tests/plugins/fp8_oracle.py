"""FP8 once more, in NumPy, one block after the other: what the reference is held against."""

from __future__ import annotations

import numpy as np

FLT_MAX = np.finfo(np.float32).max
ELEMENTS = {"e4m3": (4, 3, 7, 448.0), "e5m2": (5, 2, 15, 57344.0)}
"""Exponent bits, mantissa bits, exponent bias, largest finite value."""


def values(dtype: str) -> np.ndarray:
    """The non-negative finite values, by code."""
    _, mantissa_bits, bias, largest = ELEMENTS[dtype]
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    grid = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent.astype(float) - bias)
    )
    return grid[: int(np.searchsorted(grid, largest)) + 1]


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest value's code, the even one of two. NaN is 0x7f, and so is an infinity in E4M3."""
    grid = values(dtype)
    magnitude = np.minimum(np.abs(np.nan_to_num(x.astype(np.float64), nan=0.0)), grid[-1])
    above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    below = above - 1
    to_above, to_below = grid[above] - magnitude, magnitude - grid[below]
    code = np.where(to_above < to_below, above, below)
    code = np.where((to_above == to_below) & (above % 2 == 0), above, code)
    code = np.where(np.isinf(x), 0x7C if dtype == "e5m2" else 0x7F, code)
    signed = code + np.where(np.signbit(x), 128, 0)
    return np.where(np.isnan(x) | (np.isinf(x) & (dtype == "e4m3")), 0x7F, signed).astype(np.uint8)


def decode(code: np.ndarray, dtype: str) -> np.ndarray:
    """The values of codes."""
    finite = values(dtype)
    specials = [np.inf] if dtype == "e5m2" else []
    table = np.array([*finite, *specials] + [np.nan] * (128 - len(finite) - len(specials)), dtype=np.float32)
    return np.concatenate((table, -table))[code]


def encode_scale(amax: np.float32, dtype: str, *, pow2: bool, when_infinite: float) -> np.float32:
    """Steps 1 to 4 of a scale from an amax."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(ELEMENTS[dtype][3]) / amax
    if np.isinf(scale):
        scale = np.float32(when_infinite)
    if pow2:
        scale = np.float32(2.0 ** np.floor(np.log2(np.float64(scale))))
    return scale


def encode(
    x: np.ndarray, block: tuple[int, int], dtype: str, *, pow2: bool, when_infinite: float = FLT_MAX
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and decode scales of a matrix in fp32, block by block."""
    rows, cols = x.shape
    high, wide = block
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-rows // high), -(-cols // wide)), np.float32)
    for i, j in np.ndindex(scales.shape):
        place = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        scale = encode_scale(np.abs(x[place]).max(), dtype, pow2=pow2, when_infinite=when_infinite)
        codes[place] = cast(x[place] * scale, dtype)
        scales[i, j] = np.float32(1) / scale
    return codes, scales
