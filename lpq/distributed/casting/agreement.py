"""A check that the ranks make the same cast: of the same weights, refused by none, with parts that make up each weight.
They exchange these facts in the only collective of a cast. Else ranks that passed other weights, or the same in another
order, would encode with statistics of other weights, and a rank that refused its arguments would leave the others
waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.distributed.casting.kinds import Item, Kind
from lpq.kernels.host_to_device import on_device
from lpq.torch_private.operators import assert_later

BITS = 30
"""The bits of a word: each and its complement travel as int32 of 0 or more, so that a MAX shows whether all agree."""
DIGEST, SEED = 2, 3
"""The number of words that describe the weights, and of those that hold the seed with which they are rounded."""
LIMIT = (1 << BITS) - 1
DIGIT = 1 << 31
"""The base in which a place among the elements, which may exceed 32 bits, is written as two numbers of 0 or more."""


class Agreement:
    """The facts about the ranks' arguments that must agree, and the words in which the ranks exchange them."""

    def __init__(self, items: Sequence[Item], rank: int, ranks: int) -> None:
        self.items, self.rank, self.ranks = items, rank, ranks
        self.device = items[0].weight.device if items else torch.device("cpu")
        self._fault = next((item.fault for item in items if item.fault is not None), None)
        self._seed = next((item.seed for item in items if item.kind.stochastic), None)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the exchanged tensors: a flag for each rank that refuses; the words and their complements; and
        for each weight where each rank's part begins and ends, and the way back from end to start."""
        if self.ranks == 1:
            return [(0,), (0, 2, 2, 2)]
        return [(self.ranks + 2 * (DIGEST + SEED),), (len(self.items), self.ranks + 1, 2, 2)]

    def write(self, facts: Tensor, places: Tensor) -> None:
        """Write the words of this rank over zeros, for a MAX over the ranks."""
        if self.ranks == 1:
            return
        refuses = [int(rank == self.rank and self._fault is not None) for rank in range(self.ranks)]
        words = [*_digest(self.items), *[0] * SEED]
        facts.copy_(on_device([*refuses, *words, *(LIMIT - word for word in words)], torch.int32, self.device))
        if self._seed is not None:
            shifts = on_device([BITS * i for i in range(SEED)], torch.int64, self.device)
            seed = (self._seed.to(torch.int64) >> shifts) & LIMIT
            facts[self.ranks :].view(2, -1)[:, DIGEST:] = torch.stack([seed, LIMIT - seed]).to(torch.int32)
        if self.items:
            own = [[[divmod(at, DIGIT) for at in span] for span in (i.span, (i.weight.numel(), 0))] for i in self.items]
            which = on_device([self.rank, self.ranks], torch.int64, self.device)
            places.index_copy_(1, which, on_device(own, torch.int32, self.device))

    def check(self, facts: Tensor, places: Tensor) -> None:
        """Refuse a cast that one rank refuses, arguments that are not the same on all, and parts that leave a gap or
        overlap. All ranks get the same words, so all refuse."""
        if self._fault is not None:
            raise self._fault
        if self.ranks == 1:
            return
        refuse, (words, complements) = facts[: self.ranks], facts[self.ranks :].view(2, -1)
        differ, right = words + complements != LIMIT, whole(places)
        if self.device.type != "cpu":  # the host does not wait for the result
            same = ~(differ.any() | refuse.any())
            assert_later(same, "all ranks must pass the same weights, in the same order, with the same seed")
            assert_later(right.all(), "the ranks of the group must own each element of every master once")
            return
        if refusing := [rank for rank, flag in enumerate(refuse.tolist()) if flag]:
            raise ValueError(
                f"rank {', '.join(map(str, refusing))} of the group refused what it got, so nothing was cast on any "
                "rank: its own error says why"
            )
        if differ[:DIGEST].any():
            raise ValueError(
                "the ranks of the group passed different weights: pass weights of the same shapes and quantizers on "
                "all of them, in the same order, each with a state or without"
            )
        if differ[DIGEST:].any():
            raise ValueError("the ranks of the group passed different seeds: pass the same one on all of them")
        for item, ok, parts in zip(self.items, right.tolist(), places.tolist(), strict=True):
            if not ok:
                raise ValueError(_wrong(item, [tuple(high * DIGIT + low for high, low in part) for part in parts[:-1]]))


def _digest(items: Sequence[Item]) -> list[int]:
    """Words of a hash of the weights in their order: of all but their values."""
    texts: dict[Kind, int] = {}
    order = [texts.setdefault(item.kind, len(texts)) for item in items]
    facts = [(str(k.quantizer), k.holds_row, k.holds_col, k.rows, k.cols, str(k.dtype), k.remembers) for k in texts]
    number = int.from_bytes(hashlib.sha256(repr((facts, order)).encode()).digest()[:8], "big")
    return [number >> (BITS * i) & LIMIT for i in range(DIGEST)]


def whole(places: Tensor) -> Tensor:
    """Whether the parts of each weight cover it, each element once. No part ends before it begins. So the parts cover
    the weight if they and the way back from end to start make one round, and every other round is an empty part by
    itself: that is, if as many parts begin at each place as end there.
    """
    ordered = places.clone().view(torch.int64)[..., 0].sort(1).values
    return (ordered[..., 0] == ordered[..., 1]).all(1)


def _wrong(item: Item, parts: Sequence[tuple[int, ...]]) -> str:
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
