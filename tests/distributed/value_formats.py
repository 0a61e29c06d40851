"""Formats whose buffers hold several numbers for each block. Their inputs may be anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from plugin import Plugin
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats.blocks import block_amax, pad_blocks, scale_blocks
from lpq.formats.elements import pack_nibbles, unpack_nibbles
from lpq.formats.layout import Block

NAMES = ("values_codebook", "values_codebook(block=1x32)", "values_codebook(block=tensor)", "values_eight")
BLOCKS: dict[str, Block] = {"256x32": (256, 32), "1x32": (1, 32), "tensor": (None, None)}
LEAST = 1e-30


def _levels(amax: Tensor) -> Tensor:
    """Sixteen bf16 numbers for each block, along a last dimension."""
    steps = (torch.arange(16, dtype=torch.float32, device=amax.device) - 8) / 7
    return (_largest(amax).float().unsqueeze(-1) * steps).bfloat16()


def _largest(amax: Tensor) -> Tensor:
    return amax.bfloat16()


class CodebookStorage(Storage):
    @classmethod
    def layout_for(cls, quantizer: Quantizer) -> tuple[Buffer, ...]:
        assert isinstance(quantizer, CodebookQuantizer)
        return (
            Buffer("data", torch.uint8, block=(1, 2)),
            Buffer(
                "codebook", torch.bfloat16, block=BLOCKS[quantizer.block], values=16, from_stats=bool(quantizer.stats)
            ),
        )

    def _codes(self) -> Tensor:
        return unpack_nibbles(self.data)[:, : self.shape[1]]

    def decode(self) -> Tensor:
        assert isinstance(self.quantizer, CodebookQuantizer)
        code, codebook = self._codes().long(), self.codebook.float()
        down, across = BLOCKS[self.quantizer.block]
        if down is None or across is None:
            return codebook[code]
        row, col = (torch.arange(size, device=code.device) for size in self.shape)
        return codebook[(row // down)[:, None], col // across, code]

    def transposed(self) -> CodebookStorage:
        turned = pad_blocks(self._codes().t().contiguous() ^ 8, (1, 2)) ^ 8  # 8 is the code of zero
        return CodebookStorage(data=pack_nibbles(turned), codebook=self.codebook.clone())


@dataclass(frozen=True)
class CodebookQuantizer(Quantizer):
    """4-bit codes of a codebook that each block has. Where that is of one row, no statistic tells of it."""

    block: Literal["256x32", "1x32", "tensor"] = "256x32"
    error_bound: ClassVar[float] = 0.25

    @property
    def stats(self) -> tuple[Stat, ...]:
        return () if self.block == "1x32" else (Stat("amax", block=BLOCKS[self.block]),)

    @property
    def transposable(self) -> bool:
        return self.block == "tensor"

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {stat.name: block_amax(x, stat.block) for stat in self.stats}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> CodebookStorage:
        block = BLOCKS[self.block]
        amax = stats["amax"] if self.stats else block_amax(x, block)
        share = scale_blocks(x, 7 / _largest(amax).float().clamp(min=LEAST), block).nan_to_num()
        code = (pad_blocks(share, (1, 2)).round().clamp(-7, 7) + 8).to(torch.uint8)
        return CodebookStorage(data=pack_nibbles(code), codebook=_levels(amax))


class EightStorage(Storage):
    layout = (
        Buffer("data", torch.uint8, block=(1, 8), values=3),
        Buffer("scale", torch.float32, block=(1, 32)),
    )

    def decode(self) -> Tensor:
        low, middle, high = self.data.int().unbind(-1)
        word = low | middle << 8 | high << 16
        shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=word.device)
        code = (word.unsqueeze(-1) >> shifts & 7).flatten(1)[:, : self.shape[1]]
        return scale_blocks(code - 4, self.scale, (1, 32))


@dataclass(frozen=True)
class EightQuantizer(Quantizer):
    """Eight 3-bit codes lie in three bytes."""

    error_bound: ClassVar[float] = 0.3

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> EightStorage:
        scale = block_amax(x, (1, 32)) / 3
        code = scale_blocks(x, 1 / scale.clamp(min=LEAST), (1, 32)).nan_to_num().round().clamp(-3, 3).int()
        eights = pad_blocks(code, (1, 8)).unflatten(1, (-1, 8)) + 4
        word = (eights << torch.arange(0, 24, 3, dtype=torch.int32, device=code.device)).sum(-1, dtype=torch.int32)
        return EightStorage(data=torch.stack([word >> by & 255 for by in (0, 8, 16)], -1).to(torch.uint8), scale=scale)


CLASSES = {name: f"{name.title()}Quantizer {name.title()}Storage" for name in ("codebook", "eight")}
BITS = {"values_codebook": 4 + 16 * 16 / (256 * 32), "values_eight": 3 + 32 / 32}
register = Plugin(__name__, "values", {f"values_{name}": kinds for name, kinds in CLASSES.items()}, BITS).register
