"""Formats that do what no built-in one does and a third party's may. Their inputs must be finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from plugin import Plugin
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats.blocks import block_amax, pad_blocks, scale_blocks

NAMES = ("odd_own", "odd_zero", "odd_tall", "odd_levels", "odd_python", "odd_mixed")


def _nibbles(code: Tensor) -> Tensor:
    """Pairs along the last dimension, the first in the high half."""
    return (code[..., ::2] << 4 | code[..., 1::2]).to(torch.uint8)


class OwnStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, 32)))

    def decode(self) -> Tensor:
        return scale_blocks(self.data, self.scale, (1, 32))


@dataclass(frozen=True)
class OwnQuantizer(Quantizer):
    """It declares no statistics: each block finds its scale when it is encoded."""

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> OwnStorage:
        scale = block_amax(x, (1, 32)) / 127
        return OwnStorage(data=scale_blocks(x, 1 / scale.clamp(min=1e-30), (1, 32)).round().to(torch.int8), scale=scale)


class ZeroStorage(Storage):
    layout = (
        Buffer("data", torch.uint8, block=(1, 2), pad=8),
        Buffer("scale", torch.float32, block=(1, None), from_stats=True),
    )

    def decode(self) -> Tensor:
        code = torch.stack((self.data >> 4, self.data & 15), -1).flatten(1)[:, : self.shape[1]]
        return (code.float() - 8) * self.scale


@dataclass(frozen=True)
class ZeroQuantizer(Quantizer):
    """The code of zero is 8, in the padding there is a 5, and the even column is in the high half of a byte."""

    stats = (Stat("amax", block=(1, None)),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, (1, None))}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> ZeroStorage:
        scale = stats["amax"].clamp(min=1e-30) / 7
        code = ((x / scale).round().clamp(-7, 7) + 8).to(torch.uint8)
        padded = pad_blocks(code - 5, (1, 8)) + 5
        return ZeroStorage(data=_nibbles(padded), scale=scale)


class TallStorage(Storage):
    layout = (
        Buffer("data", torch.uint8, block=(2, 1)),
        Buffer("scale", torch.float32, block=(None, None), from_stats=True),
    )

    def decode(self) -> Tensor:
        code = torch.stack((self.data >> 4, self.data & 15), 1).flatten(0, 1)[: self.shape[0]]
        return (code.float() - 8) * self.scale


@dataclass(frozen=True)
class TallQuantizer(Quantizer):
    """Two rows are in a byte, and one scale is for the whole matrix."""

    stats = (Stat("amax"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, (None, None))}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> TallStorage:
        scale = stats["amax"].clamp(min=1e-30) / 7
        code = ((x / scale).round().clamp(-7, 7) + 8).to(torch.uint8)
        return TallStorage(data=_nibbles(pad_blocks(code, (2, 1)).t()).t(), scale=scale)


class LevelsStorage(Storage):
    layout = (
        Buffer("data", torch.int8),
        Buffer("fine", torch.uint8, block=(1, 16), from_stats=True),
        Buffer("coarse", torch.float32, block=(1, 64), from_stats=True),
    )

    def decode(self) -> Tensor:
        return scale_blocks(scale_blocks(self.data, self.fine, (1, 16)), self.coarse, (1, 64)) / (127 * 255)


@dataclass(frozen=True)
class LevelsQuantizer(Quantizer):
    """Blocks of 16 in blocks of 64, both with a scale, both from a statistic."""

    stats = (Stat("fine", block=(1, 16)), Stat("coarse", block=(1, 64)))

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"fine": block_amax(x, (1, 16)), "coarse": block_amax(x, (1, 64))}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> LevelsStorage:
        coarse = stats["coarse"].clamp(min=1e-30)
        rows, cols = stats["fine"].shape
        ratio = scale_blocks(stats["fine"], 1 / coarse, (1, 4))[:rows, :cols]
        fine = (ratio * 255).ceil().clamp(1, 255).to(torch.uint8)
        scaled = scale_blocks(scale_blocks(x, 1 / fine.float(), (1, 16)), 1 / coarse, (1, 64))
        return LevelsStorage(data=(scaled * (127 * 255)).round().to(torch.int8), fine=fine, coarse=coarse)


class PythonStorage(TallStorage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(None, None), from_stats=True))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale


@dataclass(frozen=True)
class PythonQuantizer(Quantizer):
    """It looks at a statistic as a Python number, which works for one matrix at a time only."""

    stats = (Stat("amax"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, (None, None))}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> PythonStorage:
        amax = float(stats["amax"])
        scale = stats["amax"] / 127 if 0 < amax < float("inf") else torch.ones_like(stats["amax"])
        return PythonStorage(data=(x / scale).clamp(-127, 127).round().to(torch.int8), scale=scale)


class MixedStorage(PythonStorage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(None, None)))


@dataclass(frozen=True)
class MixedQuantizer(Quantizer):
    """It stores sums of neighbours, and does not say so."""

    stats = (Stat("amax"),)

    def _stored(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 1)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(self._stored(x), (None, None))}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> MixedStorage:
        scale = stats["amax"].clamp(min=1e-30) / 127
        return MixedStorage(data=(self._stored(x) / scale).round().to(torch.int8), scale=scale)


CLASSES = {name: name.removeprefix("odd_").title() for name in NAMES}
register = Plugin(__name__, "odd", {n: f"{kind}Quantizer {kind}Storage" for n, kind in CLASSES.items()}).register
