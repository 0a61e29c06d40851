"""Whether the ranks own each element of the masters once: they tell each other how much they own of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.distributed.casting import batches
from lpq.distributed.casting.kinds import Item

DIGIT = 1 << 30
"""A number of elements may exceed 32 bits, in which the ranks tell it."""


class Shares:
    """How many elements each rank owns of some weights."""

    def __init__(self, items: Sequence[Item], rank: int, ranks: int) -> None:
        self.items, self.rank, self.ranks = items, rank, ranks
        self.device = items[0].weight.device if items else torch.device("cpu")

    @property
    def shape(self) -> tuple[int, ...]:
        """That of what is told."""
        return len(self.items), self.ranks, 2

    def tell(self, told: Tensor) -> None:
        """Write what this rank owns over zeros, for a MAX over the ranks."""
        if self.items:
            counts = [divmod(len(item.values), DIGIT) for item in self.items]
            told[:, self.rank] = batches.on_device(counts, torch.int32, self.device)

    def check(self, told: Tensor) -> None:
        """Refuse shares that do not add up; as all ranks are told the same, all refuse."""
        totals = [item.weight.numel() for item in self.items]
        owned = (told[..., 0].long() * DIGIT + told[..., 1]).sum(1)
        if self.device.type == "cpu":
            for item, count, total in zip(self.items, owned.tolist(), totals, strict=True):
                if count != total:
                    raise ValueError(
                        f"the ranks of the group own {count} elements of masters[{item.index}], whose weight "
                        f"{list(item.weight.shape)} has {total}: together they must own each element once"
                    )
        elif totals:  # the host does not wait to know
            right = owned == batches.on_device(totals, torch.int64, self.device)
            torch._assert_async(right.all(), "the ranks of the group must own each element of every master once")
