"""INT8 with one mistake each about sizes, memory, strides, dtypes and places: what the table of matrices is for."""

from __future__ import annotations

from typing import ClassVar

import torch
from broken_formats import PURE, Int8, Int8Storage, Stats, found_by, stored
from torch import Tensor

from lpq.core import Storage

BACK = "test_values_come_back"
PARTS = "test_parts_are_encoded_as_in_the_whole"
STRIDES = "test_strides_do_not_matter"

# ---------------------------------------------------------------------------------------------- rounding


@found_by("test_ties_go_either_way", "round to the nearest code, as torch.round does, and not down or up")
class CutsOff(Int8):
    """Rounds towards zero."""

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).trunc()


# ---------------------------------------------------------------------------------------------- sizes


@found_by(PURE, "[[]601, 1103[]] *: the buffer 'data' changed when another matrix was encoded; make it in")
class KeepsMemory(Int8):
    """Makes the codes of a large matrix in memory that it keeps: the next one overwrites them."""

    kept: ClassVar[dict[object, Tensor]] = {}

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        made = super().codes(x, scale).to(torch.int8)
        return self.kept.setdefault(x.shape, made.clone()).copy_(made) if x.numel() > 1 << 16 else made


@found_by(PURE, "[[]601, 1103[]] *: the statistic 'amax' changed when another matrix was encoded")
class KeepsStatistics(Int8):
    """It measures large matrices of one height into the same memory."""

    kept: ClassVar[dict[int, Tensor]] = {}

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        amax = super().measure(x)["amax"]
        return {"amax": self.kept.setdefault(len(x), amax.clone()).copy_(amax) if len(x) > 512 else amax}


class KeepsDecodedStorage(Int8Storage):
    kept: ClassVar[dict[object, Tensor]] = {}

    def decode(self) -> Tensor:
        values = super().decode()
        return self.kept.setdefault(values.shape, values.clone()).copy_(values) if values.numel() > 1 << 18 else values


@found_by(PURE, "[[]601, 1103[]] *: what decode returned changed when another matrix was encoded")
@stored(KeepsDecodedStorage)
class KeepsDecoded(Int8):
    """Decodes large matrices into memory that it keeps."""


class Spoils(Int8):
    """Changes the codes that were made."""

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.spoilt(super().codes(x, scale))

    def spoilt(self, codes: Tensor) -> Tensor:
        return codes


@found_by(BACK, "a matrix [[]256, 256[]] *, has the relative error *treat each size, dtype and place alike")
class TurnsSquares(Spoils):
    """Takes a square of more than 128 by its other dimension."""

    def spoilt(self, codes: Tensor) -> Tensor:
        return codes.t() if codes.shape[0] == codes.shape[1] > 128 else codes


@found_by(BACK, "a matrix [[]601, 1103[]] *")
class ForgetsLastRows(Spoils):
    """Encodes a large matrix by 64 rows at a time, and none that are left."""

    def spoilt(self, codes: Tensor) -> Tensor:
        if codes.numel() > 1 << 17:
            codes[len(codes) // 64 * 64 :] = 0
        return codes


@found_by(BACK, "a matrix [[]256, 256[]] *, has the relative error *treat each size")
class TurnsTiles(TurnsSquares):
    """Takes a square of whole tiles of 128, but for one tile, by its other dimension."""

    def spoilt(self, codes: Tensor) -> Tensor:
        return super().spoilt(codes) if len(codes) % 128 == 0 else codes


@found_by(BACK, "row * of a matrix [[]65601, 9[]] * has the relative error 1.000")
class ForgetsTheTall(Spoils):
    """Encodes 65,535 rows."""

    def spoilt(self, codes: Tensor) -> Tensor:
        codes[65535:] = 0
        return codes


# ---------------------------------------------------------------------------------------------- strides


@found_by(STRIDES, "encoding the same values from a view (transposed), beside a copy of it")
class ScalesByStride(Int8):
    """Another scale for a transposed view."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        turned = x.stride(0) == 1 and x.stride(1) > 1
        return super().encode(x, {"amax": stats["amax"] * (1 + turned)})


class Misreads(Int8):
    """Reads a view otherwise than it lies."""

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(self.read(x), scale)

    def read(self, x: Tensor) -> Tensor:
        return x


@found_by(STRIDES, "encoding the same values from a view (transposed), beside a copy of it")
class ReadsRows(Misreads):
    """Reads a transposed view as if its rows lay one after the other."""

    def read(self, x: Tensor) -> Tensor:
        turned = min(x.shape) > 1 and x.t().is_contiguous()
        return torch.as_strided(x, x.shape, (x.shape[1], 1)) if turned else x


@found_by(STRIDES, "encoding the same values from a view (every other row and column), beside a copy")
class ReadsColumns(Misreads):
    """Reads a view of which neither rows nor columns lie together as if the columns did."""

    def read(self, x: Tensor) -> Tensor:
        apart = x.numel() > 0 and min(x.stride()) > 1
        return torch.as_strided(x, x.shape, (x.stride(0), 1)) if apart else x


@found_by(STRIDES, "encoding an expanded view (one number, expanded), beside a copy of it")
class ForgetsTheExpanded(Misreads):
    """Takes one number that is expanded for zeros."""

    def read(self, x: Tensor) -> Tensor:
        return x * 0 if x.numel() > 1 and x.stride() == (0, 0) else x


class FlatStorage(Int8Storage):
    def decode(self) -> Tensor:
        return torch.as_strided(self.data, self.shape, (self.shape[1], 1)).float() * self.scale


@found_by(STRIDES, "decoding buffers that are transposed views")
@stored(FlatStorage)
class DecodesRows(Int8):
    """It decodes codes as if their rows lay one after the other."""


class FarStorage(Int8Storage):
    def decode(self) -> Tensor:
        decoded = super().decode()
        return torch.cat((decoded[:512], decoded[512:] * 0.98))


@found_by(PARTS, "decoded alone and in the whole (decode each element by its block alone)")
@stored(FarStorage)
class ShrinksFarRows(Int8):
    """It decodes all rows but the first 512 by 2 % too small, which is less than its error."""


# ---------------------------------------------------------------------------------------------- dtype, size, place


@found_by(
    "test_the_same_numbers_give_the_same_bytes",
    "in torch.float16, values near *, beside the same numbers in torch.float32",
)
class FlushesHalves(Misreads):
    """Takes subnormal numbers of fp16 for zeros."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(self.read(x))

    def read(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() < 6e-5, 0, x) if x.dtype == torch.float16 else x


@found_by(BACK, "in torch.bfloat16, *an outlier in the last row and column*measure the whole matrix")
class MissesACorner(Int8):
    """Of a matrix in bf16 it does not measure the last element of the last row."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        if x.dtype == torch.bfloat16 and x.shape[1] > 1:
            x = x.clone()
            x[-1, -1] = 0
        return super().measure(x)

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x.float(), scale).clamp(-127, 127)


@found_by("test_the_default_dtype_does_not_matter", "torch's default dtype bf16 (give each new tensor")
class TakesTheDefault(Int8):
    """Makes its scale in torch's default dtype."""

    def scale(self, amax: Tensor) -> Tensor:
        return (amax / 127).to(torch.get_default_dtype()).float().clamp(min=1e-12)

    def codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().codes(x.float(), scale).clamp(-127, 127)
