"""Formats that are wrong for some numbers alone, or tell wrong numbers of themselves, and the right one beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from broken_formats import BOUNDED, Int8, Int8Storage, SharesOneScale, Stats, found_by, stored
from subtle_matrices import BACK, PARTS
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats.blocks import block_amax, expand_blocks
from lpq.formats.elements import E4M3, cast_e8m0, cast_float8, decode_e8m0, inverse_e8m0

# ---------------------------------------------------------------------------------------------- INT8


@found_by(PARTS, "256 rows from 0 on, of the 257 of a row operand *: statistic 'amax' * whatever the size*differ")
class ScalesColumnsOfSquares(Int8):
    """Takes the amaxes of the columns of a large square for amaxes of its rows."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        rows, cols = x.shape
        return super().measure(x.t() if rows == cols and rows >= 128 else x)

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x.float(), scale).clamp(-127, 127)


@found_by(BACK, "comes back with the outlier off by 0.9*measure the whole matrix, *and values of either sign")
class MeasuresTheLargest(SharesOneScale):
    """Measures the largest number, and not the largest magnitude."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        largest = x.float().amax().clamp(min=0)
        return {"amax": torch.where(x.isfinite().all(), largest, torch.nan)}

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x.float(), scale).clamp(-127, 127)


@found_by(BOUNDED, "of values up to 512 the relative RMS error is *the scale that decode multiplies by")
class LosesAnOctave(Int8):
    """Its scales are wrong for one power of two."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made, amax = super().encode(x, stats), stats["amax"]
        return Int8Storage(data=made.data, scale=torch.where((amax >= 512) & (amax < 1024), 2, 1) * made.scale)


@found_by("test_measure_returns_the_declared_statistics", "returned least as -0.0, and ranks combine the bits of stat")
class MeasuresMinusZero(Int8):
    """Measures the least number, with its sign: the least of zeros is -0.0."""

    stats = (Stat("amax", block=(1, None)), Stat("least", block=(1, None)))

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(x) | {"least": (-x).float().amax(1, keepdim=True).clamp(min=0)}


# ---------------------------------------------------------------------------------------------- MXFP8

BLOCK = (1, 32)


class MXStorage(Storage):
    layout = (Buffer("data", E4M3), Buffer("scale", torch.uint8, block=BLOCK))
    odd: ClassVar[int] = -1

    def decode(self) -> Tensor:
        scale = torch.where(self.scale == self.odd, 1.0, decode_e8m0(self.scale))
        return self.data.float() * expand_blocks(scale, BLOCK, *self.shape)


class OddEntryStorage(MXStorage):
    odd = 200


@stored(MXStorage)
@dataclass(frozen=True)
class TellsOfItsScales(Quantizer):
    """MXFP8, which tells what it would store under scales that are not rounded."""

    stats = (Stat("amax", block=BLOCK),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, BLOCK)}

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        exponent = cast_e8m0(stats["amax"] / 448)
        elements = x.float() * expand_blocks(inverse_e8m0(exponent), BLOCK, *x.shape)
        return self.storage(data=self.cast(elements), scale=exponent)

    def cast(self, elements: Tensor) -> Tensor:
        return cast_float8(elements, E4M3)

    def unrounded(self, x: Tensor, stats: Stats) -> Tensor:
        scale = expand_blocks(stats["amax"].clamp(min=1e-30) / 448, BLOCK, *x.shape)
        return cast_float8(x.float() / scale, E4M3).float() * scale


@found_by("test_large_values_overflow_or_survive", "of values up to 2.42e+24 the relative RMS error is")
@stored(OddEntryStorage)
class HasAnOddEntry(TellsOfItsScales):
    """One entry of its table of scales is wrong."""


@found_by(
    "test_no_value_is_lost_beside_a_neighbour",
    "beside a value of 1, comes back as 0, though * can come back: round to the nearest code, the least ones too",
)
class FlushesSubnormals(TellsOfItsScales):
    """Takes subnormal elements for zeros."""

    def cast(self, elements: Tensor) -> Tensor:
        return super().cast(torch.where(elements.abs() < 2.0**-6, 0.0, elements))


TOLD = "test_what_rounded_scales_cost_is_told_right"


@found_by(TOLD, "what unrounded returns has the relative error 0.1000, and with rounded scales it is 0.02")
class TellsTooMuch(TellsOfItsScales):
    """Tells of an error that no scale makes."""

    def unrounded(self, x: Tensor, stats: Stats) -> Tensor:
        return x.float() * 0.9


@found_by(TOLD, "unrounded changed its input; compute with a copy")
class TellsAndWrites(TellsOfItsScales):
    """Rounds the matrix of the caller."""

    def unrounded(self, x: Tensor, stats: Stats) -> Tensor:
        return x.mul_(16).round_().div_(16)


@found_by(TOLD, "with rounds_scales = False, 1.375 times a matrix decodes to another one times 1.375, by 0.")
class DeniesItsRounding(TellsOfItsScales):
    """Says that it rounds no scale, and rounds them to powers of two."""

    rounds_scales = False
