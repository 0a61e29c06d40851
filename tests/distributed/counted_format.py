"""A format with counts: it clips what few elements exceed, as many as all ranks together have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from plugin import Plugin
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, StateBuffer, Storage
from lpq.formats.blocks import block_amax

FEW = 0.02
"""The part of the elements that are clipped at most."""


@dataclass(frozen=True)
class CountedQuantizer(Quantizer):
    """The scale is the amax's, or half of that if no more than a few of the elements that are not zero exceed it."""

    stats = (Stat("amax"), Stat("nonzero", reduce="sum"), Stat("above", reduce="sum", round=2))

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, (None, None)), "nonzero": (x != 0).sum()}

    def measure_again(self, x: Tensor, stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"above": (x.float().abs() > stats["amax"] / 2).sum()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        few = stats["above"] <= FEW * stats["nonzero"]
        scale = (stats["amax"] * torch.where(few, 0.5, 1.0)).clamp(min=1e-30) / 127
        data = (x.float() / scale).round().clamp(-127, 127).to(torch.int8)
        return CountedStorage(data=data, scale=scale, above=stats["above"].float())


class CountedStorage(Storage):
    layout = (
        Buffer("data", torch.int8),
        Buffer("scale", torch.float32, block=(None, None)),
        Buffer("above", torch.float32, block=(None, None)),
    )

    def decode(self) -> Tensor:
        return self.data.float() * self.scale


class Once(CountedQuantizer):
    """Wrongly has no second round."""

    measure_again = Quantizer.measure_again


class Kept(CountedQuantizer):
    """Wrongly has a state."""

    state = (StateBuffer("amax"),)


class Floats(CountedQuantizer):
    """Wrongly counts in fp32, which ends at 2^24."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {name: value.float() for name, value in super().measure(x).items()}


class Old(CountedQuantizer):
    """It counts in fp32, and wants fp32 back, as plugins of interface 1 do."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {name: value.float() for name, value in super().measure(x).items()}

    def measure_again(self, x: Tensor, stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert stats["nonzero"].dtype == torch.float32
        return {name: value.float() for name, value in super().measure_again(x, stats).items()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        assert {value.dtype for value in stats.values()} == {torch.float32}
        return super().encode(x, stats)


class Below(CountedQuantizer):
    """Wrongly has the least element for a statistic."""

    stats = (Stat("low"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"low": x.float().amin()}


class Signed(CountedQuantizer):
    """It remembers the amax of the last step, less 8."""

    stats = (Stat("amax"),)
    state = (StateBuffer("low"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, (None, None))}

    def recall(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"amax": torch.where(state["low"] == 0, 1.0, state["low"] + 8)}

    def remember(self, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
        state["low"].copy_(stats["amax"] - 8)

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        none = torch.zeros((), dtype=torch.int64, device=x.device)
        return super().encode(x, {**stats, "above": none, "nonzero": none - 1})


class Falling(Signed):
    """Wrongly remembers what falls as the amax rises: MAX over the ranks would be the least amax."""

    def recall(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"amax": torch.where(state["low"] == 0, 1.0, -state["low"])}

    def remember(self, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
        state["low"].copy_(-stats["amax"])


KINDS = {"once": "Once", "kept": "Kept", "floats": "Floats", "signed": "Signed", "below": "Below", "falling": "Falling"}
register = Plugin(
    __name__,
    "counted",
    {
        "counted": "CountedQuantizer CountedStorage",
        **{f"counted_{name}": f"{kind} CountedStorage" for name, kind in KINDS.items()},
    },
).register
register_old = Plugin(__name__, "oldcounts", {"oldcounts": "Old CountedStorage"}, api_version=1).register
