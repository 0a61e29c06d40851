"""Formats with values of a whole dimension that follow from no statistic, and one that leaves odd strides. Their inputs
must be finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from plugin import Plugin
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats.blocks import block_amax, expand_blocks, scale_blocks

NAMES = ("whole_outlier", "whole_outlier(told=true)", "whole_codebook", "whole_mixed")
STRIDED = "whole_strided"


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    return scale_blocks(x, 1 / scale.clamp(min=1e-30), (1, 32)).round().to(torch.int8)


class OutlierStorage(Storage):
    layout = (
        Buffer("data", torch.int8),
        Buffer("scale", torch.float32, block=(1, 32)),
        Buffer("place", torch.int32, block=(1, None)),
        Buffer("value", torch.float32, block=(1, None)),
    )

    def decode(self) -> Tensor:
        values = scale_blocks(self.data, self.scale, (1, 32))
        return values.scatter(1, self.place.long(), self.value) if values.numel() else values


@dataclass(frozen=True)
class OutlierQuantizer(Quantizer):
    """The largest element of each row is kept as it is, and its place with it."""

    told: bool = False
    """It declares a statistic of the row, from which the place does not follow; so it says that it has no parts."""

    @property
    def stats(self) -> tuple[Stat, ...]:
        return (Stat("amax", block=(1, None)),) if self.told else ()

    @property
    def uncut(self) -> tuple[int, ...]:
        return (1,) if self.told else ()

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": block_amax(x, (1, None))}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> OutlierStorage:
        x = x.float()
        if not x.numel():
            one = x.new_zeros(x.shape[0], 1)
            return OutlierStorage(data=x.to(torch.int8), scale=x, place=one.int(), value=one)
        place = x.abs().argmax(1, keepdim=True)
        rest = x.scatter(1, place, 0)
        scale = block_amax(rest, (1, 32)) / 127
        return OutlierStorage(data=_codes(rest, scale), scale=scale, place=place.int(), value=x.gather(1, place))


class CodebookStorage(Storage):
    layout = (
        Buffer("data", torch.uint8),
        Buffer("low", torch.float32, block=(8, None)),
        Buffer("step", torch.float32, block=(8, None)),
    )

    def decode(self) -> Tensor:
        low, step = (expand_blocks(b, (8, None), *self.shape) for b in (self.low, self.step))
        return low + self.data * step


@dataclass(frozen=True)
class CodebookQuantizer(Quantizer):
    """The values of eight rows are among 256 of their own: evenly from their least to their largest."""

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> CodebookStorage:
        rows, cols = x.shape
        count = -(-rows // 8)
        groups = torch.cat([x.float(), x.float()[-1:].expand(8 * count - rows, cols)]).view(count, 8 * cols)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        step = ((high - low) / 255).clamp(min=1e-30)
        of = [expand_blocks(b, (8, None), rows, cols) for b in (low, step)]
        return CodebookStorage(data=((x - of[0]) / of[1]).round().to(torch.uint8), low=low, step=step)


class MixedStorage(Storage):
    layout = (Buffer("data", torch.float32),)

    def decode(self) -> Tensor:
        return self.data - self.data.mean(1, keepdim=True) / 2 if self.data.numel() else self.data


@dataclass(frozen=True)
class MixedQuantizer(Quantizer):
    """A row's values depend on all of its buffer, whose blocks are single elements."""

    uncut = (1,)

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> MixedStorage:
        return MixedStorage(data=(x + x.mean(1, keepdim=True)).float() if x.numel() else x.float())


class StridedStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(64, 64)))

    def decode(self) -> Tensor:
        return scale_blocks(self.data, self.scale, (64, 64))


@dataclass(frozen=True)
class StridedQuantizer(Quantizer):
    """Its scales are columns of a table, one element of which lies alone in memory, whatever its strides."""

    stats = (Stat("amax", block=(64, 64)),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": torch.stack([block_amax(x, (64, 64))] * 3, -1)[..., 1]}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> StridedStorage:
        amax = stats["amax"].clamp(min=1e-30)
        table = torch.stack([amax, amax / 127], -1)
        data = scale_blocks(x, 127 / amax, (64, 64)).round().to(torch.int8)
        return StridedStorage(data=data, scale=table[..., 1])


CLASSES = {name: name.removeprefix("whole_").title() for name in (*NAMES, STRIDED) if "(" not in name}
register = Plugin(__name__, "whole", {n: f"{kind}Quantizer {kind}Storage" for n, kind in CLASSES.items()}).register
