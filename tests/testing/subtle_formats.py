"""INT8 with one mistake each that shows only for some matrices, and the right formats beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import subtle_matrices
import subtle_rotations
import torch
from broken_formats import Int8, Int8Storage, TensorStorage, TransposesByReshape
from subtle_rotations import NamesEachTurn, NamesTheOption, Pairs
from torch import Tensor

from lpq.core import Buffer, Quantizer, RandomBits, Stat, StateBuffer, Storage
from lpq.registry import FormatSpec, hookimpl

Stats = Mapping[str, Tensor]

# ---------------------------------------------------------------------------------------------- one scale per row


class SharesRows(Int8):
    """Sixteen rows share a scale, where there are whole sixteens; it declares a scale for each row."""

    together: ClassVar[int] = 16

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        amax = super().measure(x)["amax"]
        if len(amax) % self.together == 0:
            amax = amax.view(-1, self.together, 1).amax(1).repeat_interleave(self.together, 0)
        return {"amax": amax}


class SharesTiles(SharesRows):
    """So do 128 rows, where there are whole tiles of so many."""

    together = 128


class SharesSevens(SharesRows):
    """So do seven rows."""

    together = 7


class SharesMany(SharesRows):
    """So do as many rows as a prime."""

    together = 53


class GrowsBySevens(Int8):
    """Doubles its scales where the number of elements divides by seven."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x, {"amax": stats["amax"] * (1 + (x.numel() % 7 == 0))})


class MeasuresByNines(Int8):
    """Measures twice the amax where the number of columns divides by nine."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": super().measure(x)["amax"] * (1 + (x.shape[1] % 9 == 0))}


class BlocksStorage(TensorStorage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, 4)))

    def decode(self) -> Tensor:
        scales = self.scale.repeat_interleave(4, 1)[:, : self.shape[1]]
        return self.data.float() * scales


class Blocks(Int8):
    """Four columns of a row share a scale."""

    stats = ()
    together: ClassVar[int] = 1

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        rows, cols = x.shape
        blocks = torch.nn.functional.pad(x.float(), (0, -cols % 4)).view(rows, -(-cols // 4), 4)
        amax = blocks.abs().amax(2)
        if amax.shape[1] % self.together == 0:
            amax = amax.unflatten(1, (-1, self.together)).amax(2).repeat_interleave(self.together, 1)
        scale = amax.clamp(min=1e-12) / 127
        data = (blocks / scale.unsqueeze(2)).round().clamp(-127, 127).flatten(1)[:, :cols]
        return BlocksStorage(data=data.to(torch.int8), scale=scale)


class SharesBlocks(Blocks):
    """Five such blocks share it, where there are whole fives."""

    together = 5


class HidesFarNaN(Int8):
    """Looks for NaN in the first 128 columns."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(self.near(x))

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(self.near(x), stats)

    def near(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :128], x[:, 128:].nan_to_num(0.0, 0.0, 0.0)], dim=1)


class WritesWhereNaN(Int8):
    """Clears NaN where they stand: in the tensor of the caller."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        if not x.isfinite().all():
            x.nan_to_num_()
        return super().encode(x, stats)


class ClampsItsStatistics(Int8):
    """Writes to what it is given, mostly the number that stands there."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        stats["amax"].clamp_(min=1e-12)
        return super().encode(x, stats)


class LosesTheTiny(Int8):
    """Has a least scale, of numbers that gradients fall below."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x, {"amax": stats["amax"].clamp(min=1e-6)})


class SaysThatItLosesTheTiny(LosesTheTiny):
    known_failures: ClassVar[dict[str, str]] = {"test_error_is_bounded[tiny]": "its scale is at least 1e-6"}


class MisspeltCase(Int8):
    known_failures: ClassVar[dict[str, str]] = {"test_error_is_bounded[tinny]": "its scale is at least 1e-6"}


class ClipsTheTop(Int8):
    """Clips what lies above 2^127, and stays finite."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        amax, top = stats["amax"], 2.0**127
        clipped = {"amax": torch.where(amax.isfinite(), amax.clamp(max=top), amax)}
        return super().encode(x.float().clamp(-top, top), clipped)


class ForgetsTheWide(Int8):
    """Encodes the first 1024 columns."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x, stats)
        made.data[:, 1024:] = 0
        return made


class ForgetsTheRest(Int8):
    """It encodes whole tiles of 128 columns of a wide matrix."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made, cols = super().encode(x, stats), x.shape[1]
        if cols > 256:
            made.data[:, cols // 128 * 128 :] = 0
        return made


class RoundsTwice(Int8):
    """Rounds every input to bf16 first: a value beside a tie becomes one."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x.bfloat16().to(x.dtype), stats)


class Fp16ByBf16(Int8):
    """Rounds fp16 to bf16 first, which has fewer bits."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x.bfloat16() if x.dtype == torch.float16 else x, stats)


class RoundsTiesUp(Int8):
    def encode(self, x: Tensor, stats: Stats) -> Storage:
        scale = stats["amax"].clamp(min=1e-12) / 127
        return Int8Storage(data=(x / scale + 0.5).floor().to(torch.int8), scale=scale)


# ---------------------------------------------------------------------------------------------- a transpose


class TurnedStorage(TensorStorage):
    def transposed(self) -> Storage:
        return type(self)(data=self.data.t(), scale=self.scale)


class HidesNaNStorage(TurnedStorage):
    def transposed(self) -> Storage:
        return type(self)(data=self.data.t(), scale=self.scale.nan_to_num(1.0, 1.0))


class Transposes(TransposesByReshape):
    """One scale for the tensor; ``transposed`` is as it must be."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x.float(), stats)
        return self.storage(data=made.data, scale=made.scale)


class TransposeHidesNaN(Transposes):
    """A scale that is NaN is 1 in the transpose."""


class FlatTurnedStorage(TurnedStorage):
    def transposed(self) -> Storage:
        rows, cols = self.shape
        return type(self)(data=self.data.as_strided((cols, rows), (1, cols)), scale=self.scale)


class TransposesRows(Transposes):
    """Transposes codes as if their rows lay one after the other."""


# ---------------------------------------------------------------------------------------------- parts of a matrix


class FollowingStorage(Int8Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None), from_stats=True))


class Follows(Int8):
    """It declares that its scale follows from statistics; so it does."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x, stats)
        return self.storage(data=made.data, scale=made.scale)


class RaisedByZeros(Follows):
    """A row with a zero in it has a larger scale."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": super().measure(x)["amax"] * (1 + (x == 0).any(1, keepdim=True))}


# ---------------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class Delayed(Quantizer):
    """INT8 with one scale, from the amax of the step before; of what is larger the codes saturate."""

    stats = (Stat("amax"),)
    state = (StateBuffer("last"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax().float()}

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        scale = stats["amax"].clamp(min=1e-12) / 127
        return TensorStorage(data=self.code(x.float() / scale).to(torch.int8), scale=scale)

    def code(self, x: Tensor) -> Tensor:
        return x.round().clamp(-127, 127)

    def recall(self, state: Stats) -> dict[str, Tensor]:
        return {"amax": torch.where(state["last"] > 0, state["last"], 8.0)}

    def remember(self, state: Stats, stats: Stats) -> None:
        amax = stats["amax"]
        state["last"].copy_(torch.where(amax.isfinite(), amax, state["last"]))


class NeverMoves(Delayed):
    """Keeps the first amax for ever."""

    def remember(self, state: Stats, stats: Stats) -> None:
        state["last"].copy_(torch.where(state["last"] > 0, state["last"], stats["amax"]))


@dataclass(frozen=True)
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


class NeverWraps(Longer):
    """Writes each place of its history once."""

    room = 31


@dataclass(frozen=True)
class NeverForgets(Delayed):
    """From the largest amax that there ever was."""

    def remember(self, state: Stats, stats: Stats) -> None:
        amax = stats["amax"]
        state["last"].copy_(torch.where(amax.isfinite(), torch.maximum(amax, state["last"]), state["last"]))


class MeasuresNow(Delayed):
    """It remembers an amax for others to read, and encodes with the one that is measured."""

    def recall(self, state: Stats) -> dict[str, Tensor | None]:  # type: ignore[override]
        return {"amax": None}


class Wraps(Delayed):
    """Takes the lowest eight bits of what does not fit."""

    def code(self, x: Tensor) -> Tensor:
        return x.nan_to_num().clamp(-1e9, 1e9).round().int()


# ---------------------------------------------------------------------------------------------- random bits


@dataclass(frozen=True)
class Stochastic(Int8):
    """INT8 that is rounded up with the probability of the place between two codes."""

    stochastic = True
    drift: ClassVar[float] = 0.0

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        scale = stats["amax"].clamp(min=1e-12) / 127
        code = x / scale
        up = (bits.bytes(*x.shape).float() + 0.5) / 256 + self.drift * (code != 0)
        return Int8Storage(data=(code + up).floor().clamp(-127, 127).to(torch.int8), scale=scale)


class Drifts(Stochastic):
    """Rounds up too often, by a tenth of a step."""

    drift = 0.1


class LosesTheSmall(Stochastic):
    """Rounds what is less than half of the least code to zero."""

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        step = stats["amax"].clamp(min=1e-12) / 127
        return super().encode_stochastic(torch.where(x.abs() < step / 2, 0, x), stats, bits)


class CutsTheLargest(Stochastic):
    """Says that it is unbiased, and cuts what is above half of the largest magnitude."""

    unbiased = True

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        return super().encode_stochastic(x, {"amax": stats["amax"] / 2}, bits)


class SameBits(Stochastic):
    """Rounds both operands of a tensor with the same random bits."""

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        return super().encode_stochastic(x, stats, RandomBits(bits.seed, 0, bits.offset))


class IgnoresItsPlace(Stochastic):
    """Rounds each part with the random bits of the first one."""

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        return super().encode_stochastic(x, stats, RandomBits(bits.seed, bits.direction, (0, 0)))


# ---------------------------------------------------------------------------------------------- an ordinary matrix


class PlainStorage(Storage):
    layout = (Buffer("data", None),)

    def decode(self) -> Tensor:
        return self.data.float()


@dataclass(frozen=True)
class OneShape(Quantizer):
    """An ordinary matrix, put together row by row: a compiler makes one graph for each number of rows."""

    plain = True

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return PlainStorage(data=torch.stack(list(x)) if x.numel() else x)


STORAGES: dict[type[Quantizer], type[Storage]] = {
    Blocks: BlocksStorage,
    SharesBlocks: BlocksStorage,
    Follows: FollowingStorage,
    RaisedByZeros: FollowingStorage,
    Transposes: TurnedStorage,
    TransposeHidesNaN: HidesNaNStorage,
    TransposesRows: FlatTurnedStorage,
    **subtle_matrices.STORAGES,
    **dict.fromkeys((Longer, NeverWraps, NeverForgets, MeasuresNow), TensorStorage),
    Delayed: TensorStorage,
    NeverMoves: TensorStorage,
    Wraps: TensorStorage,
    OneShape: PlainStorage,
    **subtle_rotations.STORAGES,
}


RIGHT = (
    Int8,
    Blocks,
    Transposes,
    Follows,
    Delayed,
    Stochastic,
    Pairs,
    NamesEachTurn,
    NamesTheOption,
    Longer,
    MeasuresNow,
)


def name_of(quantizer: type[Quantizer]) -> str:
    """Return a format's name here: ``subtle_ForgetsTheWide`` in lower case; those that are right have a plugin of their
    own, for a format is multiplied with those of its plugin."""
    return f"{'right' if quantizer in RIGHT else 'subtle'}_{quantizer.__name__.lower()}"


class Plugin:
    """All of these formats, as ``registry.register`` takes them."""

    def __init__(self, *quantizers: type[Quantizer]) -> None:
        self.specs = [
            FormatSpec(
                name=name_of(quantizer),
                summary="for a test",
                quantizer=f"{quantizer.__module__}:{quantizer.__name__}",
                storage=f"{storage.__module__}:{storage.__name__}",
                effective_bits=None,
            )
            for quantizer, storage in ((q, STORAGES.get(q, Int8Storage)) for q in quantizers)
        ]

    @hookimpl
    def lpq_register_formats(self) -> list[FormatSpec]:
        return self.specs
