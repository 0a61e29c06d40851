"""Whether the ranks own each element of the masters once: they exchange where their parts lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.distributed.casting.kinds import Item
from lpq.kernels.host_to_device import on_device
from lpq.torch_private.operators import assert_later

DIGIT = 1 << 31
"""The base in which a place among the elements, which may exceed 32 bits, is written as two numbers of 0 or more."""


class Shares:
    """Which elements each rank owns of some weights."""

    def __init__(self, items: Sequence[Item], rank: int, ranks: int) -> None:
        self.items, self.rank, self.ranks = items, rank, ranks
        self.device = items[0].weight.device if items else torch.device("cpu")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the words: where each rank's part begins and ends, and the way back from end to start."""
        return len(self.items), self.ranks + 1, 2, 2

    def tell(self, told: Tensor) -> None:
        """Write what this rank owns over zeros, for a MAX over the ranks."""
        if self.items:
            said = [[_digits(item.span), _digits((item.weight.numel(), 0))] for item in self.items]
            places = on_device([self.rank, self.ranks], torch.int64, self.device)
            told.index_copy_(1, places, on_device(said, torch.int32, self.device))

    def check(self, told: Tensor) -> None:
        """Refuse parts that leave a gap or overlap. All ranks get the same words, so all refuse."""
        right = whole(told)
        if self.device.type != "cpu":  # the host does not wait to know
            assert_later(right.all(), "the ranks of the group must own each element of every master once")
            return
        for i, ok in enumerate(right.tolist()):
            if not ok:
                parts = [(_place(start), _place(end)) for start, end in told[i, :-1].tolist()]
                raise ValueError(_wrong(self.items[i], parts))


def whole(told: Tensor) -> Tensor:
    """Whether the parts of each weight are all of it, and each element once.

    No part ends before it begins. So they do if they and the way back are one round, and every other round is an empty
    part by itself: that is, if a part begins wherever one ends, and as many.
    """
    places = told.clone().view(torch.int64)[..., 0].sort(1).values
    return (places[..., 0] == places[..., 1]).all(1)


def _digits(span: tuple[int, int]) -> list[tuple[int, int]]:
    return [divmod(place, DIGIT) for place in span]


def _place(digits: Sequence[int]) -> int:
    return digits[0] * DIGIT + digits[1]


def _wrong(item: Item, parts: Sequence[tuple[int, int]]) -> str:
    """The first elements that no rank owns, or several ranks own, in words."""
    at, total = 0, item.weight.numel()
    for start, end in sorted([*parts, (total, total)]):
        if start != at:
            break
        at = end
    who, first, last = ("no rank", at, start) if start > at else ("more than one rank", start, min(at, end))
    return (
        f"{who} of the group owns elements [{first}, {last}) of masters[{item.index}], whose weight "
        f"{list(item.weight.shape)} has {total}: together they must own each element once"
    )
