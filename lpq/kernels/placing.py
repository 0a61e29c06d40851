"""Placing: one launch puts in their places the bytes that ranks sent of several buffers.

A rank sends a piece of each line of a buffer, or one piece of the whole. The pieces that it sent lie one behind the
other; in the buffer, the pieces of all ranks follow each other line by line. The addresses are arguments of the
launch, since memory for what arrives is allocated anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lpq.kernels.cuda import CudaKernel
from lpq.registry import KernelSpec

MOST = 16
"""Buffers of one launch."""
BYTES = 16384
"""Bytes that one block of threads puts in place."""
PLACE = CudaKernel("common/place.cu", "place", f"({MOST * 'PPqqq'})q", threads=256, waits=True)
SPEC = KernelSpec.cuda("place", "lpq.kernels.placing:bind_places")
FIELDS = 5

Place = Callable[[Sequence[int], Sequence[int]], None]
"""``place(sources, targets)``: addresses of the bytes that the ranks sent, in the order of ranks, and of the buffers.
The device is the current one."""


class RankPieces(NamedTuple):
    """How the bytes of one buffer arrive."""

    lines: int
    """The number of lines of the buffer; each rank sends a piece of every line."""
    ranks: int
    piece: int
    """The bytes of a piece."""
    apart: int
    """The distance in bytes from the first piece of one rank to the first piece of the next."""

    @property
    def nbytes(self) -> int:
        return self.lines * self.ranks * self.piece


def bind_places(several: Sequence[RankPieces], device: torch.device) -> Place:
    """Decide the launches for these buffers once."""
    bound: list[tuple[slice, list[int], Callable[..., None]]] = []
    for first in range(0, len(several), MOST):
        some = slice(first, first + MOST)
        numbers = [n for p in several[some] for n in (0, 0, p.lines << 32 | p.ranks, p.piece, p.apart)]
        numbers += [0] * (FIELDS * MOST - len(numbers)) + [len(several[some])]
        blocks = sum(-(-p.nbytes // BYTES) for p in several[some])
        bound.append((some, numbers, PLACE.bind(device.index or 0, (), blocks)))

    def place(sources: Sequence[int], targets: Sequence[int]) -> None:
        for some, numbers, launch in bound:
            given = numbers.copy()
            end = FIELDS * given[-1]
            given[0:end:FIELDS], given[1:end:FIELDS] = sources[some], targets[some]
            launch(*given)

    return place
