"""INT8 with one mistake each that shows only for some matrices, and the right formats beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from broken_formats import (
    BOUNDED,
    PURE,
    Int8,
    Int8Storage,
    SharesOneScale,
    Stats,
    TensorStorage,
    TransposesByReshape,
    found_by,
    stored,
)
from subtle_matrices import PARTS, Misreads, Spoils
from subtle_numbers import TellsOfItsScales
from subtle_rotations import MayTurn, Pairs, Sixteens, Triples
from subtle_states import Delayed, Longer, MeasuresNow
from torch import Tensor

from lpq.core import Buffer, Quantizer, RandomBits, Stat, Storage
from lpq.formats.blocks import pad_blocks

# ---------------------------------------------------------------------------------------------- one scale per row

SHARED = "rows *, of the * of a row operand *: statistic 'amax' *differ"


@found_by(PARTS, SHARED)
class SharesRows(Int8):
    """Sixteen rows share a scale, where there are whole sixteens; it declares a scale for each row."""

    together: ClassVar[int] = 16

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        amax = super().measure(x)["amax"]
        if len(amax) % self.together == 0:
            amax = amax.view(-1, self.together, 1).amax(1).repeat_interleave(self.together, 0)
        return {"amax": amax}


@found_by(PARTS, "of the 13440 of a row operand *: statistic 'amax' * whatever the size*differ")
class SharesTiles(SharesRows):
    """So do 128 rows, where there are whole tiles of so many."""

    together = 128


@found_by(PARTS, SHARED)
class SharesSevens(SharesRows):
    """So do seven rows."""

    together = 7


@found_by(PARTS, SHARED)
class SharesMany(SharesRows):
    """So do as many rows as a prime."""

    together = 53


@found_by(PARTS, "let no value share one beyond its block*differ")
class GrowsBySevens(Int8):
    """Doubles its scales where the number of elements divides by seven."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x, {"amax": stats["amax"] * (1 + (x.numel() % 7 == 0))})


@found_by(PARTS, "columns *, of the * of a col operand *: statistic 'amax' *differ")
class MeasuresByNines(Int8):
    """Measures twice the amax where the number of columns divides by nine."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": super().measure(x)["amax"] * (1 + (x.shape[1] % 9 == 0))}


class BlocksStorage(TensorStorage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, 4)))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale.repeat_interleave(4, 1)[:, : self.shape[1]]


@stored(BlocksStorage)
class Blocks(Int8):
    """Four columns of a row share a scale."""

    stats = ()
    together: ClassVar[int] = 1
    edge: ClassVar[float] = 0.0

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        rows, cols = x.shape
        blocks = torch.nn.functional.pad(x.float(), (0, -cols % 4), value=self.edge).view(rows, -(-cols // 4), 4)
        amax = blocks.abs().amax(2)
        if amax.shape[1] % self.together == 0:
            amax = amax.unflatten(1, (-1, self.together)).amax(2).repeat_interleave(self.together, 1)
        scale = self.scale(amax)
        data = self.codes(blocks, scale.unsqueeze(2)).clamp(-127, 127).flatten(1)[:, :cols]
        return BlocksStorage(data=data.to(torch.int8), scale=scale)


@found_by(PARTS, "columns *, *buffer 'data': * elements differ")
class SharesBlocks(Blocks):
    """Five such blocks share it, where there are whole fives."""

    together = 5


@found_by(
    "test_a_ragged_edge_is_padded_with_zeros", "buffer 'data' of [[]1, 1[]], beside zeros around the matrix (pad x"
)
class PadsWithOnes(Blocks):
    """The last block of a row is filled with ones."""

    edge = 100.0


class EvenStorage(Storage):
    layout = (Buffer("data", torch.int8, pad=2), Buffer("scale", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return self.data[:, : self.shape[1]].float() * self.scale


@found_by(
    "test_a_ragged_edge_is_padded_with_zeros", "buffer 'data' of [[]1, 1[]], beside zeros around the matrix (pad x"
)
@stored(EvenStorage)
class PadsWithCodes(SharesOneScale):
    """Fills rows of an odd length with the code 1, and has a scale that all parts of a tensor share."""

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return pad_blocks(super().codes(x, scale) - 1, (1, 2)) + 1


@stored(EvenStorage)
class Counts(SharesOneScale):
    """Has twice the scale of an odd number of elements, which it measures: zeros around a matrix change that."""

    stats = (*SharesOneScale.stats, Stat("elements", reduce="sum"))

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(x) | {"elements": torch.tensor(x.numel(), device=x.device)}

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(pad_blocks(x.float(), (1, 2)), {"amax": stats["amax"] * (1 + stats["elements"] % 2)})


@found_by("test_non_finite_is_never_silently_finite", "nan at [[]0, 128[]] of *comes back as 0; it must")
class HidesFarNaN(Misreads):
    """Looks for NaN in the first 128 columns."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(self.read(x))

    def read(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :128], x[:, 128:].nan_to_num(0.0, 0.0, 0.0)], dim=1)


@found_by(PURE, "a NaN in torch.bfloat16: encode changed its input; compute with a copy")
class WritesWhereNaN(Misreads):
    """Clears NaN where they stand: in the tensor of the caller."""

    def read(self, x: Tensor) -> Tensor:
        return x if x.isfinite().all() else x.nan_to_num_()


@found_by(PURE, "a matrix *: encode writes to the statistic 'amax', here")
class ClampsItsStatistics(Int8):
    """Writes to what it is given, mostly the number that stands there."""

    def scale(self, amax: Tensor) -> Tensor:
        return super().scale(amax.clamp_(min=1e-12))


@found_by(BOUNDED, "8.* bits an element allow 0.06*: of 9.31e-10 times normal values")
class LosesTheTiny(Int8):
    """Has a least scale, of numbers that gradients fall below."""

    def scale(self, amax: Tensor) -> Tensor:
        return super().scale(amax.clamp(min=1e-6))


class SaysThatItLosesTheTiny(LosesTheTiny):
    known_failures: ClassVar[dict[str, str]] = {"test_error_is_bounded[tiny]": "its scale is at least 1e-6"}


class MisspeltCase(Int8):
    known_failures: ClassVar[dict[str, str]] = {"test_error_is_bounded[tinny]": "its scale is at least 1e-6"}


@found_by("test_large_values_overflow_or_survive", "of values up to 3.39e+38 the relative RMS error is")
class ClipsTheTop(Int8):
    """Clips what lies above 2^127, and stays finite."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        amax, top = stats["amax"], 2.0**127
        clipped = {"amax": torch.where(amax.isfinite(), amax.clamp(max=top), amax)}
        return super().encode(x.float().clamp(-top, top), clipped)


EDGES = "test_ragged_edges_do_no_harm"


@found_by(EDGES, "column 1024 of a matrix [[]5, 1025[]] *: encode the whole")
class ForgetsTheWide(Spoils):
    """Encodes the first 1024 columns."""

    def spoilt(self, codes: Tensor) -> Tensor:
        codes[:, 1024:] = 0
        return codes


@found_by(EDGES, "column * of a matrix *: encode the whole")
class ForgetsTheRest(Spoils):
    """It encodes whole tiles of 128 columns of a wide matrix."""

    def spoilt(self, codes: Tensor) -> Tensor:
        if codes.shape[1] > 256:
            codes[:, codes.shape[1] // 128 * 128 :] = 0
        return codes


TIES = "test_ties_go_either_way"


@found_by(TIES, "beside the middle of * and *, comes back as *: do not round x to a shorter dtype")
class RoundsTwice(Misreads):
    """Rounds every input to bf16 first: a value beside a tie becomes one."""

    def read(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)


@found_by("test_the_same_numbers_give_the_same_bytes", "in torch.float16, *, beside the same numbers in torch.f")
class Fp16ByBf16(Misreads):
    """Rounds fp16 to bf16 first, which has fewer bits."""

    def read(self, x: Tensor) -> Tensor:
        return x.bfloat16() if x.dtype == torch.float16 else x


@found_by(TIES, "ties above zero are rounded away from zero, the others towards it")
class RoundsTiesUp(Int8):
    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale + 0.5).floor()


# ---------------------------------------------------------------------------------------------- a transpose


class TurnedStorage(TensorStorage):
    def transposed(self) -> Storage:
        return type(self)(data=self.data.t(), scale=self.scale)


class HidesNaNStorage(TurnedStorage):
    def transposed(self) -> Storage:
        return type(self)(data=self.data.t(), scale=self.scale.nan_to_num(1.0, 1.0))


@stored(TurnedStorage)
class Transposes(TransposesByReshape):
    """One scale for the tensor; ``transposed`` is as it must be."""

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x.float(), scale)


@found_by("test_transposed_is_the_operand_of_the_transpose", "with a NaN and an infinity, *buffer 'scale': 1 of 1")
@stored(HidesNaNStorage)
class TransposeHidesNaN(Transposes):
    """A scale that is NaN is 1 in the transpose."""


class FlatTurnedStorage(TurnedStorage):
    def transposed(self) -> Storage:
        rows, cols = self.shape
        return type(self)(data=self.data.as_strided((cols, rows), (1, cols)), scale=self.scale)


@found_by(
    "test_transposed_is_right_for_every_matrix",
    "of buffers that are transposed views, *buffer 'data': * elements differ",
)
@stored(FlatTurnedStorage)
class TransposesRows(Transposes):
    """Transposes codes as if their rows lay one after the other."""


# ---------------------------------------------------------------------------------------------- parts of a matrix


class FollowingStorage(Int8Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None), from_stats=True))


@stored(FollowingStorage)
class Follows(Int8):
    """It declares that its scale follows from statistics; so it does."""


@found_by(
    "test_parts_of_a_master_are_cast_as_the_whole", "the larger statistic 'amax', which zeros may not raise*differ"
)
class RaisedByZeros(Follows):
    """A row with a zero in it has a larger scale."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": super().measure(x)["amax"] * (1 + (x == 0).any(1, keepdim=True))}


# ---------------------------------------------------------------------------------------------- random bits


class Stochastic(Int8):
    """INT8 that is rounded up with the probability of the place between two codes."""

    stochastic = True
    drift: ClassVar[float] = 0.0

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        scale = self.scale(stats["amax"])
        code = x / scale
        up = (bits.bytes(*x.shape).float() + 0.5) / 256 + self.drift * (code != 0)
        return Int8Storage(data=(code + up).floor().clamp(-127, 127).to(torch.int8), scale=scale)


@found_by("test_stochastic_rounding_is_unbiased", "the mean of 64 roundings lies +0.* upward; at most 0.1 of it")
class Drifts(Stochastic):
    """Rounds up too often, by a tenth of a step."""

    drift = 0.1


@found_by(
    "test_small_values_are_kept_on_average",
    "is off by 1.00 of it; at most 0.15 is chance: round up with the probability",
)
class LosesTheSmall(Stochastic):
    """Rounds what is less than half of the least code to zero."""

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        large = x.abs() >= self.scale(stats["amax"]) / 2
        return super().encode_stochastic(torch.where(large, x, 0), stats, bits)


@found_by(
    "test_the_mean_of_many_roundings_is_the_matrix",
    "leave room for scales that are rounded down, so that no element is cut",
)
class CutsTheLargest(Stochastic):
    """Says that it is unbiased, and cuts what is above half of the largest magnitude."""

    unbiased = True

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        return super().encode_stochastic(x, {"amax": stats["amax"] / 2}, bits)


@dataclass(frozen=True)
class MayBeStochastic(Stochastic):
    """It rounds with random bits unless an option turns them off."""

    stochastic: bool = True

    @property
    def without_random_bits(self) -> Quantizer | None:  # type: ignore[override]
        return replace(self, stochastic=False) if self.stochastic else None


@found_by("test_a_quantizer_without_random_bits_stores_what_encode_returns", "beside `encode` of * elements differ")
class SavesRoom(MayBeStochastic):
    """Leaves room in its scales for random bits, and says that it does not."""

    def scale(self, amax: Tensor) -> Tensor:
        return super().scale(amax) * (1.25 if self.stochastic else 1)


@found_by("test_directions_draw_bits_of_their_own", "the same matrix, correlate by 1.00; they must be")
class SameBits(Stochastic):
    """Rounds both operands of a tensor with the same random bits."""

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        return super().encode_stochastic(x, stats, RandomBits(bits.seed, 0, bits.offset))


@found_by(PARTS, "(take scales from stats, * buffer 'data': * elements differ")
class IgnoresItsPlace(Stochastic):
    """Rounds each part with the random bits of the first one."""

    def encode_stochastic(self, x: Tensor, stats: Stats, bits: RandomBits) -> Storage:
        return super().encode_stochastic(x, stats, RandomBits(bits.seed, bits.direction, (0, 0)))


# ---------------------------------------------------------------------------------------------- an ordinary matrix


class FirstScaleStorage(TensorStorage):
    def decode(self) -> Tensor:
        return self.data.float() * self.scale.flatten()[0]


@found_by("test_values_of_rows_decode_alike", "rows of three matrices by * beside each matrix by itself")
@stored(FirstScaleStorage)
class DecodesByTheFirst(SharesOneScale):
    """Says that rows may have scales of their own, and decodes all by one."""

    @property
    def by_rows(self) -> Quantizer:
        return self


class PlainStorage(Storage):
    layout = (Buffer("data", None),)

    def decode(self) -> Tensor:
        return self.data.float()


@stored(PlainStorage)
@dataclass(frozen=True)
class OneShape(Quantizer):
    """An ordinary matrix, put together row by row: a compiler makes one graph for each number of rows."""

    plain = True

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return PlainStorage(data=torch.stack(list(x)) if x.numel() else x)


RIGHT = (
    Int8, Blocks, Transposes, Follows, Delayed, Stochastic, MayBeStochastic, Pairs, Triples, Sixteens, Longer,
    MeasuresNow, MayTurn, TellsOfItsScales, Counts,
)  # fmt: skip
"""Formats without a mistake."""
