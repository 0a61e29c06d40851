"""The operand of a matrix less the mean of its tokens, and that mean.

Tokens are the rows of a row operand and the columns, the contraction, of a column operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from lpq.core import Buffer, Quantizer, Storage
from lpq.formats import parts
from lpq.formats.format import Direction

TOKENS = {"rows": 0, "columns": 1}
OVERFLOW = [f"test_large_values_overflow_or_survive[2^{power}]" for power in (30, 90, 125)]


class MeanSplitStorage(Storage):
    @classmethod
    def layout_for(cls, quantizer: Any) -> tuple[Buffer, ...]:
        block = (None, 1) if quantizer.over == "rows" else (1, None)
        return (*parts.named(rest=quantizer.rest.layout), Buffer("mean", torch.float32, block=block))

    def decode(self) -> Tensor:
        return parts.part(self, "rest", self.quantizer.rest).decode() + self.mean  # type: ignore[attr-defined]


@dataclass(frozen=True)
class MeanSplitQuantizer(Quantizer):
    """``rest`` encodes what is left without the mean over tokens."""

    rest: Quantizer
    over: Literal["rows", "columns"] = "rows"
    """The dimension of the tokens in a row operand; in a column operand it is always the columns."""

    @property
    def known_failures(self) -> dict[str, str]:
        failures = {
            "test_what_it_represents_stays": "the mean of a decoded matrix may be another",
            "test_zeros_stay_zeros": "a zero is the mean below the mean, and that is rounded",
            "test_ties_go_either_way": "values lie beside a mean that each of them moves",
            **dict.fromkeys(OVERFLOW, "a value that is small beside the mean may change its sign"),
        }
        if self.over == "columns":
            failures["test_no_value_is_lost_beside_a_neighbour"] = "a small value is the mean of its line below that"
        return failures

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        return super().from_options(**parts.read(cls, options))

    @cached_property
    def sides(self) -> dict[Direction, Self]:
        col = parts.side(self, "col")
        return {"row": parts.side(self, "row"), "col": col if col.over == "columns" else replace(col, over="columns")}

    def side(self, direction: Direction) -> Self:
        return self.sides[direction]

    @property
    def uncut(self) -> tuple[int, ...]:
        return parts.uncut(later=[self.rest])

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        # Summed in fp64, in which the order of the terms seldom matters.
        mean = x.double().mean(TOKENS[self.over], keepdim=True).float()
        rest = parts.encode(self.rest, x.float() - mean)
        return MeanSplitStorage(**parts.joined(rest=rest.buffers()), mean=mean)
