"""INT8 with one mistake each about sizes, memory, strides, dtypes and places: what the table of matrices is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from broken_formats import Int8, Int8Storage
from torch import Tensor

from lpq.core import Storage

Stats = Mapping[str, Tensor]

# ---------------------------------------------------------------------------------------------- sizes


class KeepsMemory(Int8):
    """Makes the codes of a large matrix in memory that it keeps: the next one overwrites them."""

    kept: ClassVar[dict[object, Tensor]] = {}

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x, stats)
        if x.numel() <= 1 << 16:
            return made
        return Int8Storage(data=self.kept.setdefault(x.shape, made.data.clone()).copy_(made.data), scale=made.scale)


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
        if values.numel() <= 1 << 18:
            return values
        return self.kept.setdefault(values.shape, values.clone()).copy_(values)


class KeepsDecoded(Int8):
    """Decodes large matrices into memory that it keeps."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x, stats)
        return self.storage(data=made.data, scale=made.scale)


class TurnsSquares(Int8):
    """Takes a square of more than 128 by its other dimension."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made, (rows, cols) = super().encode(x, stats), x.shape
        return Int8Storage(data=made.data.t(), scale=made.scale) if rows == cols > 128 else made


class ForgetsLastRows(Int8):
    """Encodes a large matrix by 64 rows at a time, and none that are left."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x, stats)
        if x.numel() > 1 << 17:
            made.data[len(x) // 64 * 64 :] = 0
        return made


class TurnsTiles(Int8):
    """Takes a square of whole tiles of 128, but for one tile, by its other dimension."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made, (rows, cols) = super().encode(x, stats), x.shape
        whole = rows == cols > 128 and rows % 128 == 0
        return Int8Storage(data=made.data.t(), scale=made.scale) if whole else made


class ForgetsTheTall(Int8):
    """Encodes 65,535 rows."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        made = super().encode(x, stats)
        made.data[65535:] = 0
        return made


# ---------------------------------------------------------------------------------------------- strides


class ScalesByStride(Int8):
    """Another scale for a transposed view."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        turned = x.stride(0) == 1 and x.stride(1) > 1
        return super().encode(x, {"amax": stats["amax"] * (1 + turned)})


class ReadsRows(Int8):
    """Reads a transposed view as if its rows lay one after the other."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        turned = min(x.shape) > 1 and x.t().is_contiguous()
        return super().encode(torch.as_strided(x, x.shape, (x.shape[1], 1)) if turned else x, stats)


class ReadsColumns(Int8):
    """Reads a view of which neither rows nor columns lie together as if the columns did."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        apart = x.numel() > 0 and min(x.stride()) > 1
        return super().encode(torch.as_strided(x, x.shape, (x.stride(0), 1)) if apart else x, stats)


class ForgetsTheExpanded(Int8):
    """Takes one number that is expanded for zeros."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(x * 0 if x.numel() > 1 and x.stride() == (0, 0) else x, stats)


class FlatStorage(Int8Storage):
    def decode(self) -> Tensor:
        return torch.as_strided(self.data, self.shape, (self.shape[1], 1)).float() * self.scale


class DecodesRows(KeepsDecoded):
    """It decodes codes as if their rows lay one after the other."""


class FarStorage(Int8Storage):
    def decode(self) -> Tensor:
        decoded = super().decode()
        return torch.cat((decoded[:512], decoded[512:] * 0.98))


class ShrinksFarRows(KeepsDecoded):
    """It decodes all rows but the first 512 by 2 % too small, which is less than its error."""


# ---------------------------------------------------------------------------------------------- dtype, size, place


class FlushesHalves(Int8):
    """Takes subnormal numbers of fp16 for zeros."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return super().measure(self.flushed(x))

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        return super().encode(self.flushed(x), stats)

    def flushed(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() < 6e-5, 0, x) if x.dtype == torch.float16 else x


class MissesACorner(Int8):
    """Of a matrix in bf16 it does not measure the last element of the last row."""

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        if x.dtype == torch.bfloat16 and x.shape[1] > 1:
            x = x.clone()
            x[-1, -1] = 0
        return super().measure(x)

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        scale = stats["amax"].clamp(min=1e-12) / 127
        return Int8Storage(data=(x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale=scale)


class TakesTheDefault(Int8):
    """Makes its scale in torch's default dtype."""

    def encode(self, x: Tensor, stats: Stats) -> Storage:
        largest = (stats["amax"] / 127).to(torch.get_default_dtype()).float().clamp(min=1e-12)
        return Int8Storage(data=(x.float() / largest).round().clamp(-127, 127).to(torch.int8), scale=largest)


STORAGES: dict[type[Int8], type[Storage]] = {
    KeepsDecoded: KeepsDecodedStorage,
    DecodesRows: FlatStorage,
    ShrinksFarRows: FarStorage,
}
