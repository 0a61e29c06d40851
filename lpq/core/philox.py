"""Random bits as a pure function of a seed and an element's place: Philox 4x32-10 in integer operations.

Element ``(row, col)`` of an operand takes byte ``col % 16`` of the 16 bytes that Philox gives for the counter
``(col // 16, row, direction, 0)`` under the key ``(seed mod 2^32, seed div 2^32)``. So a kernel needs one Philox call
for 16 elements along the contraction, a shard that knows its offset draws the bits of the whole, and the two
directions of a tensor are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
GROUP = 16


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words (in int64) for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A 64-bit product wraps in int64, but its two halves are right: the shift's sign bits are masked away.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) & MASK ^ c1 ^ k0, p1 & MASK, (p0 >> 32) & MASK ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


@dataclass(frozen=True, eq=False)
class RandomBits:
    """The random bits of one operand, or of a shard of it."""

    seed: Tensor
    """int64, 0-dimensional, on the device that uses it: a CUDA graph may replay with another value."""
    direction: int
    """0 for the row operand, 1 for the column operand."""
    offset: tuple[int, int] = (0, 0)
    """The place of this shard's first element in the whole operand."""

    def bytes(self, rows: int, cols: int) -> Tensor:
        """One random byte for each element of a matrix ``[rows, cols]``, as int32."""
        device = self.seed.device
        first = self.offset[1] // GROUP
        skip = self.offset[1] - first * GROUP
        groups = -(-(skip + cols) // GROUP)
        c0 = torch.arange(first, first + groups, device=device).expand(rows, groups)
        c1 = torch.arange(self.offset[0], self.offset[0] + rows, device=device)[:, None].expand(rows, groups)
        zero = torch.zeros_like(c0)
        words = torch.stack(
            philox((c0, c1, zero + self.direction, zero), (self.seed & MASK, (self.seed >> 32) & MASK)), dim=-1
        )
        shifts = torch.arange(0, 32, 8, device=device)
        bits = (words[..., None] >> shifts) & 0xFF
        return bits.reshape(rows, groups * GROUP)[:, skip : skip + cols].int()
