"""Hadamard transforms of the columns of a tile in Triton; ``lpq.formats.rotation.HADAMARD``, 16 columns at a time."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from lpq.kernels.triton.numbers import narrow, widen

WIDTH = tl.constexpr(16)
MINUS = tl.constexpr(0xD7E8)
"""Bit i is set where the sign of column i of 16 is negative."""


@triton.jit
def _signs(WIDE: tl.constexpr):
    minus = tl.full((1, WIDE), MINUS, tl.int32) >> (tl.arange(0, WIDE) % WIDTH)[None, :]
    return (1 - 2 * (minus & 1)).to(tl.float32)


@triton.jit
def hadamard(x, LOG: tl.constexpr):
    """Sums and differences of elements half a group of 2^LOG apart, then of nearer ones.

    Each pass takes the first bit of an element's place in its group as the difference and makes it the last one, so
    that after LOG passes all are where they were.
    """
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    for _ in tl.static_range(LOG):
        a, b = tl.split(tl.permute(tl.reshape(x, (high, wide >> LOG, 2, (1 << LOG) // 2)), (0, 1, 3, 2)))
        x = tl.reshape(tl.join(a + b, a - b), (high, wide))
    return x


@triton.jit
def rotate(x):
    """Rotate as the reference does, rounded to bf16."""
    return widen(narrow(hadamard(x * (_signs(x.shape[1]) * 0.25), 4), tl.bfloat16))


@triton.jit
def unrotate(x):
    """Undo the rotation, as the reference does."""
    return hadamard(x * 0.25, 4) * _signs(x.shape[1])
