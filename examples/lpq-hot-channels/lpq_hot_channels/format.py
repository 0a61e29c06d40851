"""The operand of a matrix with zeros in place of its hot columns, and those columns in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.formats import parts
from lpq.formats.format import Direction
from lpq.registry.errors import OptionError


class HotChannelsStorage(Storage):
    @classmethod
    def layout_for(cls, quantizer: Any) -> tuple[Buffer, ...]:
        hot = Buffer("hot", torch.bfloat16, block=(1, None), values=len(quantizer.numbers))
        return (*parts.named(rest=quantizer.rest.layout), hot)

    def decode(self) -> Tensor:
        quantizer: Any = self.quantizer
        decoded = parts.part(self, "rest", quantizer.rest).decode().clone()
        there = quantizer.columns(decoded)
        decoded[:, there] = self.hot[:, 0, : len(there)].float()
        return decoded


@dataclass(frozen=True)
class HotChannelsQuantizer(Quantizer):
    """``rest`` encodes the matrix without some columns. Both operands of a product need the same ``channels``."""

    rest: Quantizer
    channels: str
    """The numbers of the columns that are kept in bf16, from 0 on, as ``"3 17 40"``; those past the last are left
    out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        words = self.channels.split()
        if not words or not all(word.isdecimal() for word in words) or sorted({*map(int, words)}) != [*map(int, words)]:
            raise OptionError(
                f'hot_channels: channels={self.channels!r}: list numbers of columns in ascending order, as "3 17 40"'
            )

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        if "channels" not in options:
            raise OptionError('hot_channels needs the columns that are hot: add channels="3 17 40"')
        return super().from_options(**parts.read(cls, options | {"channels": str(options["channels"])}))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        return tuple(map(int, self.channels.split()))

    def columns(self, x: Tensor) -> list[int]:
        """The hot columns that a matrix has."""
        return [number for number in self.numbers if number < x.shape[1]]

    @cached_property
    def sides(self) -> dict[Direction, Self]:
        return {"row": parts.side(self, "row"), "col": parts.side(self, "col")}

    def side(self, direction: Direction) -> Self:
        return self.sides[direction]

    @property
    def stats(self) -> tuple[Stat, ...]:
        # No amax is of the whole matrix: a compiler must not measure it in the place of ``measure``.
        return parts.named(rest=[replace(stat, largest=False) for stat in self.rest.stats])

    @property
    def uncut(self) -> tuple[int, ...]:
        return tuple({*parts.uncut(self.rest), 1})  # columns have numbers of their own

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return parts.joined(rest=parts.measure(self.rest, self._without(x)))

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        there = self.columns(x)
        hot = x.new_zeros(x.shape[0], 1, len(self.numbers), dtype=torch.bfloat16)
        hot[:, 0, : len(there)] = x[:, there].to(torch.bfloat16)
        rest = parts.encode(self.rest, self._without(x), parts.taken("rest", stats))
        return HotChannelsStorage(**parts.joined(rest=rest.buffers()), hot=hot)

    def _without(self, x: Tensor) -> Tensor:
        """The matrix with zeros in its hot columns."""
        rest = x.clone()
        rest[:, self.columns(x)] = 0
        return rest
