"""A format with two levels of scales and none of the whole: fp32 for 128 elements of E2M1, E4M3 within it for 16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from plugin import Plugin
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats.blocks import block_amax, expand_blocks, pad_blocks, scale_blocks
from lpq.formats.elements import (
    E4M3,
    FLT_MAX,
    cast_e2m1,
    cast_float8,
    decode_e2m1_pairs,
    decode_float8,
    pack_nibbles,
)

INNER, OUTER = (1, 16), (1, 128)


def unit(amax: Tensor) -> Tensor:
    """The value of an element 1 with a scale of 1."""
    return torch.where(amax == 0, 1.0, amax / (6 * 448)).clamp(min=1 / FLT_MAX)


class DoubleStorage(Storage):
    layout = (
        Buffer("data", torch.uint8, block=(1, 2)),
        Buffer("scale", E4M3, block=INNER, from_stats=True),
        Buffer("amax", torch.float32, block=OUTER, from_stats=True),
    )

    def decode(self) -> Tensor:
        elements = decode_e2m1_pairs(self.data)[:, : self.shape[1]]
        return scale_blocks(scale_blocks(elements, decode_float8(self.scale), INNER), unit(self.amax), OUTER)


@dataclass(frozen=True)
class DoubleQuantizer(Quantizer):
    stats = (Stat("amax", block=OUTER, largest=True), Stat("block_amax", block=INNER, largest=True))

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, OUTER), "block_amax": block_amax(x, INNER)}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> DoubleStorage:
        amax, blocks = stats["amax"], stats["block_amax"]
        units = expand_blocks(unit(amax), (1, OUTER[1] // INNER[1]), *blocks.shape)
        scale = cast_float8(blocks / units / 6, E4M3)
        step = decode_float8(scale) * units
        factor = torch.where(step > 0, step.reciprocal().clamp(max=FLT_MAX), 0.0)
        codes = cast_e2m1(scale_blocks(x, factor, INNER))
        return DoubleStorage(data=pack_nibbles(pad_blocks(codes, (1, 2))), scale=scale, amax=amax)


register = Plugin(__name__, "double", {"double": "DoubleQuantizer DoubleStorage"}).register
