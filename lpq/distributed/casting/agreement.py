"""Whether the ranks mean the same cast: they exchange which weights it casts, and whether one rank refuses it.

They do so in the only collective of a cast. Else ranks that passed other weights, or the same in another order, would
encode with statistics of other weights, and a rank that refused its arguments would leave the others waiting.
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
"""How many words describe the weights, and how many the seed with which they are rounded."""
LIMIT = (1 << BITS) - 1


class Agreement:
    """The facts about the ranks' arguments that must agree, and the words in which the ranks exchange them."""

    def __init__(self, items: Sequence[Item], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.device = items[0].weight.device if items else torch.device("cpu")
        self._fault = next((item.fault for item in items if item.fault is not None), None)
        self._words = _digest(items)
        self._seed = next((item.seed for item in items if item.kind.stochastic), None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is exchanged: a flag for each rank that refuses, the words and their complements."""
        return (self.ranks + 2 * (DIGEST + SEED) if self.ranks > 1 else 0,)

    def tell(self, told: Tensor) -> None:
        """Write the words of this rank, for a MAX over the ranks."""
        if self.ranks == 1:
            return
        refuses = [int(rank == self.rank and self._fault is not None) for rank in range(self.ranks)]
        words = [*self._words, *[0] * SEED]
        said = [*refuses, *words, *(LIMIT - word for word in words)]
        told.copy_(on_device(said, torch.int32, self.device))
        if self._seed is not None:
            shifts = on_device([BITS * i for i in range(SEED)], torch.int64, self.device)
            seed = (self._seed.to(torch.int64) >> shifts) & LIMIT
            told[self.ranks :].view(2, -1)[:, DIGEST:] = torch.stack([seed, LIMIT - seed]).to(torch.int32)

    def check(self, told: Tensor) -> None:
        """Refuse what one rank refuses, or what is not the same on all. All ranks get the same words, so all refuse."""
        if self._fault is not None:
            raise self._fault
        if self.ranks == 1:
            return
        refuse, (words, complements) = told[: self.ranks], told[self.ranks :].view(2, -1)
        differ = words + complements != LIMIT
        if self.device.type != "cpu":  # the host does not wait to know
            right = ~(differ.any() | refuse.any())
            assert_later(right, "all ranks must pass the same weights, in the same order, with the same seed")
            return
        if refusing := [rank for rank, said in enumerate(refuse.tolist()) if said]:
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


def _digest(items: Sequence[Item]) -> list[int]:
    """Words of a hash of the weights in their order: of all but their values."""
    texts: dict[Kind, int] = {}
    order = [texts.setdefault(item.kind, len(texts)) for item in items]
    said = [(str(k.quantizer), k.holds_row, k.holds_col, k.rows, k.cols, str(k.dtype), k.remembers) for k in texts]
    number = int.from_bytes(hashlib.sha256(repr((said, order)).encode()).digest()[:8], "big")
    return [number >> (BITS * i) & LIMIT for i in range(DIGEST)]
