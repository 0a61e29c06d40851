"""INT8 as an author would write it, and what could go wrong: each class makes one mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.registry import FormatSpec, hookimpl
from lpq.registry.errors import OptionError

Stats = Mapping[str, Tensor]
F = TypeVar("F", bound=type[Quantizer])
MISTAKES: dict[type[Quantizer], tuple[str, str]] = {}
"""Formats that make a mistake: the test of the kit that is about it, and words that this test says."""
STORAGES: dict[type[Quantizer], type[Storage]] = {}
"""The storages of formats, and of formats that are made of them."""


def found_by(test: str, words: str) -> Callable[[F], F]:
    """Note the test that finds the mistake of a format, and the words with which it does."""

    def noted(quantizer: F) -> F:
        MISTAKES[quantizer] = test, words
        return quantizer

    return noted


def stored(storage: type[Storage]) -> Callable[[F], F]:
    """Give a format its storage."""

    def noted(quantizer: F) -> F:
        STORAGES[quantizer] = storage
        return quantizer

    return noted


class Int8Storage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale


@stored(Int8Storage)
@dataclass(frozen=True)
class Int8(Quantizer):
    stats = (Stat("amax", block=(1, None)),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax(dim=1, keepdim=True).float()}

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        scale = self.scale(stats["amax"])
        return self.storage(data=self.codes(x, scale).to(torch.int8), scale=scale)

    def scale(self, amax: Tensor) -> Tensor:
        return amax.clamp(min=1e-12) / 127

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).round()


class Unscaled(Int8):
    """Its scale is that of any matrix."""

    stats = ()

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x, {"amax": torch.full((x.shape[0], 1), 127.0, device=x.device)})


@found_by("test_a_declared_amax_is_one", "stats declares amax with largest=True, and measure returned another value")
class SaysThatItIsTheLargest(Int8):
    """Its statistic is twice what it is declared to be."""

    stats = (Stat("amax", block=(1, None), largest=True),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": super().measure(x)["amax"] * 2}


FILLS = "test_encode_fills_the_declared_buffers"


@found_by(FILLS, "WrongDtype.encode returned data as torch.int16; Int8Storage.layout declares torch.int8, block (1, 1)")
class WrongDtype(Int8):
    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x, stats)
        return Int8Storage(data=made.data.short(), scale=made.scale)


PURE = "test_encode_is_pure"


class SaysTransposable(Int8):
    transposable = True


@found_by(PURE, "encoding the same matrix a second time (it may be random only by *, the buffer 'data'")
class Dithers(Int8):
    """Random, without saying so."""

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x + torch.rand_like(x) * 1e-2, scale)


@found_by(PURE, "encode changed its input")
class ChangesItsInput(Int8):
    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x.mul_(1.5), scale)


@found_by("test_parts_are_encoded_as_in_the_whole", "with statistics reduced over parts")
class RankLocal(Int8):
    """Takes the scale from what it sees, which on a rank is a shard."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x, self.measure(x) if x.numel() else stats)


@found_by("test_non_finite_is_never_silently_finite", "comes back as")
class HidesNaN(Int8):
    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x.nan_to_num(), {"amax": stats["amax"].nan_to_num(nan=1.0, posinf=1.0)})


BOUNDED = "test_error_is_bounded"


@found_by(BOUNDED, "the relative RMS error of normal values is")
class LosesTheScale(Int8):
    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x, stats)
        return Int8Storage(data=made.data, scale=torch.full_like(made.scale, 1 / 32))


class TimesStorage(Int8Storage):
    times: ClassVar[float] = 2.0

    def decode(self) -> Tensor:
        return super().decode() * self.times


class SlightlyMoreStorage(TimesStorage):
    times = 1.03


@found_by(BOUNDED, "decoded is 2.00 times x; multiply in decode by what encode divides by")
@stored(TimesStorage)
class Doubles(Int8):
    """Decodes to twice the values."""


@found_by("test_no_factor_is_left", "decoded normal values are 1.03* times as long along the values; with an error of")
@stored(SlightlyMoreStorage)
class Grows(Int8):
    """Decodes to a little more than the values: less than its bits allow for an error."""


@found_by(BOUNDED, "magnitudes come back and signs do not; keep the sign of each code")
class DropsSigns(Int8):
    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x.abs(), scale)


@found_by("test_what_it_represents_stays", "moves it by *, 0.9* times itself; *: divide in encode by what decode mult")
class DividesByMore(Int8):
    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x, scale * 1.05)


class TensorStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale

    def transposed(self) -> Storage:
        rows, cols = self.shape
        return TensorStorage(data=self.data.reshape(cols, rows), scale=self.scale)


@found_by("test_transposed_is_the_operand_of_the_transpose", "TensorStorage.transposed of")
@stored(TensorStorage)
class TransposesByReshape(Int8):
    """One scale for the tensor, so transposable; but ``transposed`` moves no element."""

    stats = (Stat("amax"),)
    transposable = True

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax().float()}


class SharesOneScale(TransposesByReshape):
    """One scale for the tensor; right as far as no operand is derived."""

    transposable = False


class NoZero(Int8):
    """Has a grid without a zero, and says so."""

    known_failures: ClassVar[dict[str, str]] = {"test_zeros_stay_zeros": "this grid has no zero"}

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        codes = super().codes(x, scale)
        return torch.where(codes == 0, 1, codes)


@dataclass(frozen=True)
class MaybeNoZero(NoZero):
    """Has a grid with or without a zero, and says of the latter that it has none."""

    zero: bool = True

    @property
    def known_failures(self) -> dict[str, str]:  # type: ignore[override]
        return {} if self.zero else {"test_zeros_stay_zeros": "without zero=true this grid has no zero"}

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return Int8.codes(self, x, scale) if self.zero else super().codes(x, scale)


@found_by(BOUNDED, "of normal values is 0.*; 8.* bits an element allow 0.06")
class ThreeBits(Int8):
    """Keeps three bits in each byte: more error than eight stored bits promise."""

    def scale(self, amax: Tensor) -> Tensor:
        return amax.clamp(min=1e-12) / 3


class HonestThreeBits(ThreeBits):
    error_bound: ClassVar[float] = 0.35


@found_by(BOUNDED, "its error_bound is 2.0000, which holds for values that were")
class BoundlessThreeBits(ThreeBits):
    """Says of its error what no mistake exceeds."""

    error_bound: ClassVar[float] = 2.0


@found_by(BOUNDED, "of normal values is 0.*; its error_bound is 0.3500")
class BoundedButLost(LosesTheScale):
    error_bound: ClassVar[float] = 0.35


@found_by("test_large_values_overflow_or_survive", "of values up to *e+3* the relative RMS error is *; 8")
class LosesTheTop(Int8):
    """Clips its scale, and so what is large, and stays finite."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        amax = {"amax": stats["amax"].clamp(max=2.0**100)}
        return super().encode(x.clamp(-(2.0**100), 2.0**100), amax)


class Pessimist(Int8):
    """Claims a failure that it does not have."""

    known_failures: ClassVar[dict[str, str]] = {"test_zeros_stay_zeros": "it is said"}


class Misspelt(Int8):
    known_failures: ClassVar[dict[str, str]] = {"test_zeroes_stay_zeros": "this grid has no zero"}


@dataclass(frozen=True)
class Modes(Int8):
    """Has two options; nothing is wrong with it."""

    wide: bool = False
    mode: Literal["a", "b"] = "a"


class Picky(Modes):
    """Has two options that do not go together; nothing else is wrong with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wide and self.mode == "b":
            raise OptionError("wide goes with mode a only")


@dataclass(frozen=True)
class Levels(Int8):
    """Has an option that has to be given; nothing is wrong with it."""

    levels: int


@dataclass(frozen=True)
class LeavesOneOut(Int8):
    """An option that ``==`` leaves out: what was made for one quantizer is taken for another."""

    half: bool = field(default=False, compare=False)


@dataclass(frozen=True, eq=False)
class IsItself(Int8):
    """Equal to itself alone."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True)
class ComparesLetters(Int8):
    """Its own ``==`` takes words for the same that differ in case."""

    mode: str = "a"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComparesLetters) and self.mode.lower() == other.mode.lower()

    __hash__ = Int8.__hash__


class Word(str):
    """A word that is equal to others."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@dataclass(frozen=True)
class TakesWords(Int8):
    mode: str = "a"
    step: float = 1.0


class Plugin:
    """A plugin with some of these formats, as ``registry.register`` takes it.

    Args:
        quantizers: the formats
        names: their names, with ``{}`` for the name of a class in lower case
        fields: other fields of their ``FormatSpec``
    """

    def __init__(self, *quantizers: type[Quantizer], names: str = "broken", **fields: Any) -> None:
        self.specs = []
        for quantizer in quantizers:
            where = {"quantizer": _path(quantizer), "storage": _path(_storage_of(quantizer)), "effective_bits": 8}
            name = names.format(quantizer.__name__.lower())
            self.specs.append(FormatSpec(name=name, summary="for a test", **{**where, **fields}))

    @hookimpl
    def lpq_register_formats(self) -> list[FormatSpec]:
        return self.specs


def _storage_of(quantizer: type[Quantizer]) -> type[Storage]:
    return next(STORAGES[base] for base in quantizer.__mro__ if base in STORAGES)


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__name__}"
