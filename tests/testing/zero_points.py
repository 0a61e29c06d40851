"""UINT8 between the least and the largest element of a matrix, with a zero point: the ends are two statistics, and no
amax. The code 255 is NaN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from plugin import Plugin
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage


def grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The step of the codes, and the code of 0."""
    step = ((low + high) / 254).clamp(min=1e-30)
    return step, (low / step).round()


class ZeroStorage(Storage):
    layout = (
        Buffer("data", torch.uint8),
        Buffer("low", torch.float32, block=(None, None)),
        Buffer("high", torch.float32, block=(None, None)),
    )

    def decode(self) -> Tensor:
        step, zero = grid(self.low, self.high)
        return torch.where(self.data == 255, torch.nan, (self.data.float() - zero) * step)

    def transposed(self) -> ZeroStorage:
        return ZeroStorage(data=self.data.t().contiguous(), low=self.low, high=self.high)


@dataclass(frozen=True)
class ZeroQuantizer(Quantizer):
    stats = (Stat("low"), Stat("high"))
    transposable = True

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {name: ends.float().amax().clamp(min=0) + 0.0 for name, ends in (("low", -x), ("high", x))}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> ZeroStorage:
        step, zero = grid(stats["low"], stats["high"])
        codes = ((x.float() / step).round() + zero).clamp(0, 254)
        return ZeroStorage(data=codes.nan_to_num(255).to(torch.uint8), low=stats["low"], high=stats["high"])


register = Plugin(__name__, "zero", {"zero": "ZeroQuantizer ZeroStorage"}).register
