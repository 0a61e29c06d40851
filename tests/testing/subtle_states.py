"""INT8 that remembers statistics across steps, with one mistake each, and the right formats beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from broken_formats import Int8, SharesOneScale, Stats, found_by, stored
from torch import Tensor

from lpq.core import Buffer, Stat, StateBuffer, Storage

STATE, SPIKE = "test_state_follows_the_tensor", "test_a_spike_is_forgotten"
SILENT = "test_non_finite_is_never_silently_finite"
ODD = -128
"""The code of what is not finite, of which a scale from other steps knows nothing."""


class OddStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return torch.where(self.data == ODD, torch.nan, self.data.float()) * self.scale


@stored(OddStorage)
class Delayed(Int8):
    """INT8 with one scale, from the amax of the step before; of what is larger the codes saturate."""

    stats = (Stat("amax"),)
    state = (StateBuffer("last"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax().float()}

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.where(x.isfinite(), super().codes(x.float(), scale).clamp(-127, 127), ODD)

    def recall(self, state: Stats) -> dict[str, Tensor]:
        return {"amax": torch.where(state["last"] > 0, state["last"], 8.0)}

    def remember(self, state: Stats, stats: Stats) -> None:
        amax = stats["amax"]
        state["last"].copy_(torch.where(amax.isfinite(), amax, state["last"]))


@found_by(STATE, "NeverMoves.recall gives the same statistics as before, after 8")
class NeverMoves(Delayed):
    """Keeps the first amax for ever."""

    def remember(self, state: Stats, stats: Stats) -> None:
        state["last"].copy_(torch.where(state["last"] > 0, state["last"], stats["amax"]))


class Longer(Delayed):
    """From the largest amax of the last 32 steps; at the end of the state lies the number of the step."""

    state = (StateBuffer("last", (33,)),)
    room: ClassVar[int] = 32

    def recall(self, state: Stats) -> dict[str, Tensor]:
        largest = state["last"][:-1].amax()
        return {"amax": torch.where(largest > 0, largest, 8.0)}

    def remember(self, state: Stats, stats: Stats) -> None:
        step = int(state["last"][-1])
        if step < self.room or self.room == 32:
            amax = stats["amax"]
            state["last"][step % 32] = torch.where(amax.isfinite(), amax, 0.0)
        state["last"][-1] += 1


@found_by(STATE, "the same statistics as before, after 35 steps with a tensor")
class NeverWraps(Longer):
    """Writes each place of its history once."""

    room = 31


@found_by(
    SPIKE,
    "8 steps after one whose tensor was a thousand times as large, recall still gives",
)
class NeverForgets(Delayed):
    """From the largest amax that there ever was."""

    def remember(self, state: Stats, stats: Stats) -> None:
        super().remember(state, {"amax": torch.maximum(stats["amax"], state["last"])})


class MeasuresNow(Delayed):
    """It remembers an amax for others to read, and encodes with the one that is measured."""

    def recall(self, state: Stats) -> dict[str, Tensor | None]:  # type: ignore[override]
        return {"amax": None}


@found_by("test_values_beyond_what_is_remembered_saturate", "beyond the * that its state remembers, comes back as")
class Wraps(Delayed):
    """Takes the lowest eight bits of what does not fit."""

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() / scale).nan_to_num().clamp(-1e9, 1e9).round().int()


@found_by(SILENT, "nan at [[]0, 0[]] of *comes back as 0; *: keep a code for it, as -128 of INT8: here *'amax'* came")
class HidesWhatIsOdd(Delayed):
    """A NaN is a zero, an infinity the largest code: the scale is of the step before."""

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return Int8.codes(self, x.float(), scale).nan_to_num().clamp(-127, 127)


@found_by(SILENT, "nan at [[]0, 0[]] of *comes back as 0; *: keep a code for it, as -128 of INT8: here *'amax'* came")
@dataclass(frozen=True)
class HidesWhatIsStatic(SharesOneScale):
    """Likewise, once its amax is static."""

    static: bool = False

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x.float(), scale).nan_to_num().clamp(-127, 127)


@found_by(SPIKE, "8 steps after one whose tensor had an infinity in it, recall still gives a 'amax' of 8")
class AveragesInfinities(Delayed):
    """The mean of all amaxes, the latest of which count most."""

    def remember(self, state: Stats, stats: Stats) -> None:
        state["last"].lerp_(stats["amax"], 0.5)


@found_by(SPIKE, "8 steps after one whose tensor had a NaN in it, recall still gives a 'amax' of 8")
class AveragesNaN(Delayed):
    """Likewise, without infinities."""

    def remember(self, state: Stats, stats: Stats) -> None:
        amax = stats["amax"]
        state["last"].lerp_(torch.where(amax.isinf(), state["last"], amax), 0.5)
