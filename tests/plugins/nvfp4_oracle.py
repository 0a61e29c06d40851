"""NVFP4 once more, in NumPy: what the reference is held against."""

from __future__ import annotations

from typing import NamedTuple

import fp8_oracle
import numpy as np

f32 = np.float32
FLT_MAX = np.finfo(f32).max
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])


class Encoded(NamedTuple):
    codes: np.ndarray
    """One code for each element, the columns that a rotation needs included."""
    scales: np.ndarray
    amax: np.float32
    decoded: np.ndarray
    """In fp32, still rotated."""


def rotate(x: np.ndarray) -> np.ndarray:
    """16 columns at a time through the signs and the Sylvester matrix, then rounded to bf16.

    fp32 sums of 16 depend on their order. This is that of the butterflies: the upper half of the elements is
    added to the lower and subtracted from it, and each half is dealt with likewise.
    """
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))
    signed = x * np.tile(SIGNS, x.shape[1] // 16).astype(f32) * f32(0.25)
    with np.errstate(over="ignore", invalid="ignore"):
        rotated = [butterfly(group) for group in np.split(signed, range(16, x.shape[1], 16), axis=1)]
    return to_bf16(np.concatenate(rotated, axis=1))


def butterfly(x: np.ndarray) -> np.ndarray:
    if x.shape[1] <= 1:
        return x
    low, high = np.split(x, 2, axis=1)
    return np.concatenate((butterfly(low + high), butterfly(low - high)), axis=1)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), f32(np.nan), rounded.view(f32))


def cast(y: np.ndarray, random: np.ndarray | None) -> np.ndarray:
    """Codes of fp32 numbers, rounded to nearest even or by one random byte for each."""
    magnitude = np.abs(np.nan_to_num(y, nan=6.0)).astype(np.float64)
    sign = np.where(np.signbit(y) & ~np.isnan(y), 8, 0)
    if random is None:
        ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        upper = np.searchsorted(ties, magnitude, side="left")
        at_tie = np.isin(magnitude, ties)
        return upper + (at_tie & (upper % 2 == 1)) | sign
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0))
    total = (np.minimum(magnitude, 100) + random / 256 * step).astype(f32)
    return np.searchsorted(GRID, total, side="right") - 1 | sign


def encode(
    x: np.ndarray,
    block: tuple[int, int],
    *,
    rht: bool = False,
    random: np.ndarray | None = None,
    roomy: bool = False,
) -> Encoded:
    """A matrix in fp32; ``random`` holds a byte for each element to round with; ``roomy``: no element is cut."""
    x = rotate(x) if rht else x
    high, wide = block
    rows, cols = x.shape
    padded = np.pad(np.abs(x), ((0, -rows % high), (0, -cols % wide)))
    amaxes = padded.reshape(len(padded) // high, high, -1, wide).max((1, 3))
    amax, sixth = amaxes.max(), f32(1 / 6)
    if roomy:
        sixth = f32(17 / 96)
        if amax < np.inf:
            with np.errstate(over="ignore"):
                amax = min(amax * f32(17 / 16), FLT_MAX)
    of_block = np.s_[np.arange(rows)[:, None] // high, np.arange(cols) // wide]
    with np.errstate(all="ignore"):
        overall = np.minimum(f32(2688) / amax, FLT_MAX) if 0 < amax < np.inf else f32(1)
        scales = fp8_oracle.cast(np.minimum(amaxes * (overall * sixth), f32(448)), "e4m3")
        scale = fp8_oracle.decode(scales, "e4m3")
        factor = np.minimum(f32(1) / (scale * (f32(1) / overall)), FLT_MAX)
        codes = cast(x * factor[of_block], random)
        value = np.concatenate((GRID, -GRID)).astype(f32)[codes] * scale[of_block]
        # Rounded as in fp32, but in a range that an enormous amax does not leave.
        product = round24((value.astype(np.float64) * amax).astype(np.longdouble))
        decoded = round24(product * np.longdouble(f32(1 / 2688))).astype(f32)
    return Encoded(codes.astype(np.uint8), scales, amax, decoded)


def round24(x: np.ndarray) -> np.ndarray:
    """Rounded to 24 significant bits, and to no fewer binary places than fp32 has."""
    fraction, exponent = np.frexp(x)
    places = np.minimum(24, exponent + 149)
    return np.ldexp(np.rint(np.ldexp(fraction, places)), exponent - places)
