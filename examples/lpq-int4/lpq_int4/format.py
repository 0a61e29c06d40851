"""MXFP4 as the OCP Microscaling Formats (MX) Specification v1.0 defines it, in plain PyTorch.

A block is 32 elements along the contraction. They share a scale ``2^(e - 127)``, of which ``e`` is stored
(E8M0); each is an E2M1 value, that is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign, two of them in a byte.

The scale is that of section 6.3: the largest power of two that is at most the amax of a block, divided by 4,
the largest power of two in E2M1. So the amax lands in [4, 8), and what lies above 6 saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats.blocks import block_amax, pad_blocks, scale_blocks
from lpq.formats.elements import cast_e2m1, decode_e2m1_pairs, decode_e8m0, inverse_e8m0, pack_nibbles

BLOCK = (1, 32)
PAIR = (1, 2)
LARGEST_EXPONENT = 2
"""Of E2M1, whose largest power of two is 4."""
NAN = 255


def shared_exponent(amax: Tensor) -> Tensor:
    """The biased exponent of a block with this amax: at least 0, and 255, for NaN, if it is not finite."""
    exponent = (amax.view(torch.int32) >> 23) - LARGEST_EXPONENT
    return torch.where(amax.isfinite(), exponent.clamp(min=0), NAN).to(torch.uint8)


class MXFP4Storage(Storage):
    """``data``: two E2M1 values in a byte, the even column low. ``scale``: an exponent for each block."""

    layout = (Buffer("data", torch.uint8, block=PAIR), Buffer("scale", torch.uint8, block=BLOCK, from_stats=True))

    def decode(self) -> Tensor:
        elements = decode_e2m1_pairs(self.data)[:, : self.shape[1]]
        return scale_blocks(elements, decode_e8m0(self.scale), BLOCK)


@dataclass(frozen=True)
class MXFP4Quantizer(Quantizer):
    """4-bit floats, with a power-of-two scale for each 32 along the contraction."""

    stats = (Stat("amax", block=BLOCK),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, BLOCK)}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> MXFP4Storage:
        scale = shared_exponent(stats["amax"])
        codes = cast_e2m1(scale_blocks(x, inverse_e8m0(scale), BLOCK))
        return MXFP4Storage(data=pack_nibbles(pad_blocks(codes, PAIR)), scale=scale)
