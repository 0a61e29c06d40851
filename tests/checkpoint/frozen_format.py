"""A format whose scale is frozen: it follows an amax that somebody set, and that training reads and never moves."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lpq import registry
from lpq.core import Buffer, Quantizer, Stat, StateBuffer, Storage
from lpq.registry import FormatSpec, hookimpl


def register() -> None:
    """Make it known in this process, as a plugin that is not packaged."""
    registry.register(sys.modules[__name__], name="frozen")


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="frozen",
        summary="INT8 with one scale for the tensor, from a calibrated amax",
        quantizer=f"{__name__}:FrozenQuantizer",
        storage=f"{__name__}:FrozenStorage",
        effective_bits=8,
    )


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
