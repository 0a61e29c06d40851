"""INT4 in plain PyTorch: integers from -7 to 7, on a grid whose steps are all equal.

A block is 16 elements along the contraction. Its scale is an E4M3 number ``s``, relative to ``amax / 3136``, where
``amax`` is the operand's and 3136 is 7, the largest element, times 448, the largest scale. An element ``q`` stands for
``q · s · amax / 3136``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats.blocks import block_amax, pad_blocks, scale_blocks
from lpq.formats.elements import E4M3, FLT_MAX, cast_float8, decode_float8, pack_nibbles, unpack_nibbles

BLOCK = (1, 16)
LARGEST = 7.0
LARGEST_OF_ALL = LARGEST * torch.finfo(E4M3).max


def unit_of(amax: Tensor) -> Tensor:
    """Return the value of an element 1 with a scale of 1; 1 where there is nothing to encode."""
    return torch.where(amax == 0, 1.0, amax / LARGEST_OF_ALL).clamp(min=1 / FLT_MAX)


class INT4Storage(Storage):
    """``data``: two integers in a byte, the even column low. ``scale``: E4M3 for each block. ``amax``: of all of it."""

    layout = (
        Buffer("data", torch.uint8, block=(1, 2)),
        Buffer("scale", E4M3, block=BLOCK, from_stats=True),
        Buffer("amax", torch.float32, block=(None, None), from_stats=True),
    )

    def decode(self) -> Tensor:
        integers = (unpack_nibbles(self.data)[:, : self.shape[1]] ^ 8).float() - 8  # in two's complement
        return scale_blocks(integers, decode_float8(self.scale), BLOCK) * unit_of(self.amax)


@dataclass(frozen=True)
class INT4Quantizer(Quantizer):
    """4-bit integers, with an 8-bit scale for each 16 along the contraction and an fp32 amax for the operand."""

    stats = (Stat("amax", largest=True), Stat("block_amax", block=BLOCK, largest=True))

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        amaxes = block_amax(x, BLOCK)
        return {"amax": block_amax(amaxes, (None, None)), "block_amax": amaxes}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> INT4Storage:
        amax = stats["amax"]
        scale = cast_float8(stats["block_amax"] / unit_of(amax) / LARGEST, E4M3)
        step = decode_float8(scale) * unit_of(amax)
        factor = torch.where(step > 0, step.reciprocal().clamp(max=FLT_MAX), 0.0)
        integers = scale_blocks(x, factor, BLOCK).nan_to_num().round().clamp(-LARGEST, LARGEST)
        codes = integers.to(torch.int8).view(torch.uint8) & 15
        return INT4Storage(data=pack_nibbles(pad_blocks(codes, (1, 2))), scale=scale, amax=amax)
