"""A format whose scale is frozen: it follows an amax that somebody set, and that training reads and never moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from plugin import Plugin
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, StateBuffer, Storage


class FrozenStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale


@dataclass(frozen=True)
class FrozenQuantizer(Quantizer):
    """Its memory never moves: ``remember`` is the one of ``Quantizer``, which does nothing."""

    stats = (Stat("amax"),)
    state = (StateBuffer("amax"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)}

    def recall(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"amax": state["amax"]}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> FrozenStorage:
        scale = stats["amax"].clamp(min=1e-30) / 127
        return FrozenStorage(data=(x / scale).round().clamp(-127, 127).to(torch.int8), scale=scale)


register = Plugin(__name__, "frozen", {"frozen": "FrozenQuantizer FrozenStorage"}, {"frozen": 8}).register
