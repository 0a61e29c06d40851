"""Random bits as a pure function of a seed and an element's place: Philox 4x32-10 in integer operations.

Element ``(row, col)`` of an operand takes byte ``col % 16`` of the 16 bytes that Philox gives for the counter
``(col // 16, row, direction, 0)`` under the key ``(seed mod 2^32, seed div 2^32)``. So a kernel calls Philox
once for 16 elements along the contraction, a shard that has its offset draws the bits of the whole, and the
two directions of a tensor are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
GROUP = 16
OF_PASS = 2
"""In the counter of bits of a pass, in place of a direction."""
WORD = 32

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Counter, key: tuple[Tensor, Tensor]) -> Counter:
    """Four 32-bit words (in int64) for each counter, whose words may have any shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A 64-bit product wraps in int64, but its halves are right: the shift's sign bits are masked away.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(p1) ^ (c1 ^ k0), p1 & MASK, _high(p0) ^ (c3 ^ k1), p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32).bitwise_and_(MASK)


def signs_of(turn: Tensor, count: int) -> Tensor:
    """1 or -1, in fp32, ``count`` of them (a multiple of 32), by the bits of Philox for ``turn``: 128 for each of the
    counters ``(0, 0, 2, 0)``, ``(1, 0, 2, 0)``, … under the key ``(0, turn mod 2^32)``."""
    zero, key = torch.zeros_like(turn, dtype=torch.int64), turn.long() & MASK
    blocks = torch.arange(-(-count // (4 * WORD)), device=turn.device)
    words = torch.stack(philox((blocks, zero, zero + OF_PASS, zero), (zero, key)), dim=-1).flatten()
    bits = words[:, None] >> torch.arange(WORD, device=turn.device) & 1
    return (1 - 2 * bits).flatten()[:count].float()


@dataclass(frozen=True, eq=False)
class RandomBits:
    """The random bits of one operand, or of a shard of it."""

    seed: Tensor
    """int64, 0-dimensional, on the device that uses it: a CUDA graph may replay with another value."""
    direction: int
    """0 for the row operand, 1 for the column operand."""
    offset: tuple[int, int] = (0, 0)
    """The place of this shard's first element in the whole operand."""

    @property
    def turn(self) -> Tensor:
        """The number by which a rotation is drawn (``Rotation.drawn``): the storage keeps it as ``turn``."""
        return (self.seed << WORD >> WORD).int()  # the half that all tensors of a pass of a layer have in common

    def bytes(self, rows: int, cols: int) -> Tensor:
        """One random byte for each element of a matrix ``[rows, cols]``."""
        device = self.seed.device
        first, skip = divmod(self.offset[1], GROUP)
        groups = -(-(skip + cols) // GROUP)
        group = torch.arange(first, first + groups, device=device)
        row = torch.arange(self.offset[0], self.offset[0] + rows, device=device)[:, None]
        direction, zero = torch.full_like(self.seed, self.direction), torch.zeros_like(self.seed)
        words = philox((group, row, direction, zero), (self.seed & MASK, (self.seed >> 32) & MASK))
        drawn = torch.stack([word.int() for word in words], dim=-1).view(torch.uint8)
        return drawn.view(rows, groups * GROUP)[:, skip : skip + cols]
