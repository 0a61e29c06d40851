"""MS-EDEN: groups of 128 columns are rotated, and their length is corrected before scales are rounded stochastically.

The README has the formulas.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lpq.core import Buffer, Quantizer, RandomBits, Rotation, Stat, Storage
from lpq.formats.blocks import block_amax, scale_blocks
from lpq.formats.elements import (
    E4M3,
    cast_e2m1,
    cast_float8,
    decode_e2m1,
    decode_e2m1_pairs,
    decode_float8,
    pack_nibbles,
)
from lpq.operations.exact_form import Exact

ROTATED = 128
"""Columns that are rotated and corrected together."""
BLOCK = (1, 16)
LARGEST = 6 / (0.93 * 17 / 16)
"""The element that the amax of a block becomes."""
LARGEST_SCALE = 255.99
"""The largest scale before the correction, which may raise it."""


def step_of(amax: Tensor) -> Tensor:
    """The d of a matrix."""
    step = amax / LARGEST_SCALE / LARGEST
    return torch.where(step == 0, 1.0, step)


def scales(y: Tensor, step: Tensor) -> Tensor:
    """The E4M3 scale of each block, before it is corrected."""
    return cast_float8(block_amax(y, BLOCK) / (step * LARGEST), E4M3)


def corrections(z: Tensor, q: Tensor) -> Tensor:
    """Σz² / Σzq of each group, summed in fp64 by halves."""
    groups = (z.shape[0], z.shape[1] // ROTATED, ROTATED)
    exact, rounded = z.double().view(groups), q.double().view(groups)
    over, under = _summed(exact * exact), _summed(exact * rounded)
    return torch.where(under == 0, 1.0, over / under).float()


def _summed(terms: Tensor) -> Tensor:
    while terms.shape[-1] > 1:
        first, second = terms.chunk(2, dim=-1)
        terms = first + second
    return terms[..., 0]


def rounded_scales(target: Tensor, chance: Tensor) -> Tensor:
    """The E4M3 number below each of these, or the number above it where ``chance``, in [0, 1), is less than the share
    of the way there."""
    near = cast_float8(target, E4M3)
    code = near.view(torch.uint8).int()
    below = torch.where(decode_float8(near) > target, code - 1, code)
    lower, upper = (decode_float8(c.to(torch.uint8).view(E4M3)) for c in (below, (below + 1).clamp(max=0x7E)))
    up = (upper > lower) & (chance * (upper - lower) < target - lower)
    return torch.where(target.isnan(), code, below + up).to(torch.uint8).view(E4M3)


class EdenStorage(Storage):
    layout = (
        Buffer("data", torch.uint8, block=(1, 2), pad=ROTATED),
        Buffer("scale", E4M3, block=BLOCK, pad=ROTATED),
        Buffer("amax", torch.float32, block=(None, None)),
    )

    def decode_stored(self) -> Tensor:
        return scale_blocks(decode_e2m1_pairs(self.data), decode_float8(self.scale), BLOCK) * step_of(self.amax)


@dataclass(frozen=True)
class EdenQuantizer(Quantizer):
    """NVFP4 by MS-EDEN. Both operands of a product need equal ``signs``."""

    signs: int = 0
    """The number of the signs of the rotation."""
    stats = (Stat("amax"),)
    stochastic: ClassVar[bool] = True  # type: ignore[misc]
    known_failures: ClassVar[dict[str, str]] = {
        "test_stochastic_rounding_is_unbiased": "the mean over rotations is the matrix, and one quantizer has one",
        "test_directions_draw_bits_of_their_own": "bits round scales alone, which are a small part of the error",
    }

    @cached_property
    def rotation(self) -> Rotation | None:
        bits = random.Random(self.signs).getrandbits(ROTATED)
        return Rotation(signs=tuple(1 - 2 * (bits >> i & 1) for i in range(ROTATED)))

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, (None, None))}

    def encode_stochastic(self, x: Tensor, stats: Mapping[str, Tensor], bits: RandomBits) -> Storage:
        (rows, cols), step = x.shape, step_of(stats["amax"])
        scale = decode_float8(scales(x, step))
        scale = torch.where(scale == 0, 1.0, scale)
        z = (x.view(rows, cols // BLOCK[1], BLOCK[1]) / (scale * step)[:, :, None]).view(rows, cols)
        code = cast_e2m1(z)
        target = scale * corrections(z, decode_e2m1(code)).repeat_interleave(ROTATED // BLOCK[1], 1)
        drawn = bits.bytes(rows, cols).view(rows, cols // BLOCK[1], BLOCK[1])[:, :, :2].float()
        chance = (drawn[:, :, 0] * 256 + drawn[:, :, 1]) / 2**16
        return EdenStorage(data=pack_nibbles(code), scale=rounded_scales(target, chance), amax=stats["amax"])


def exact(operand: EdenStorage) -> Exact | None:
    """Elements times block scales, which bf16 holds, and d as a factor. A rotation is left where it is."""
    if operand.shape[1] % ROTATED:
        return None
    matrix = scale_blocks(decode_e2m1_pairs(operand.data), decode_float8(operand.scale), BLOCK)
    return Exact(matrix.to(torch.bfloat16), step_of(operand.amax))
