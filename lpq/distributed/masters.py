"""Master weights that ranks share out: cast to quantized weights that every rank holds whole.

As in ZeRO: each rank owns a piece of each flattened fp32 master, anywhere, of any length. One collective for all
weights tells every rank what it needs of the others; then each rank has all scales and encodes its piece. When the
bytes are gathered, every buffer is what encoding the whole master would have made it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from lpq.core import QuantizedTensor
from lpq.distributed.casting.casts import Cast, Piece, Whole
from lpq.distributed.casting.given import items_of
from lpq.distributed.casting.kinds import Item, Kind
from lpq.distributed.casting.parts import InParts
from lpq.distributed.casting.shares import Shares

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Piece", "Pieces", "cast_master_weights", "finish_gather"]


class Pieces(Sequence[Piece]):
    """What is to be gathered after a cast: the same buffers on all ranks, in the same order."""

    def __init__(self, items: Sequence[Item], rank: int, ranks: int) -> None:
        kinds: dict[Kind, list[Item]] = {}
        self._without_elements = [item for item in items if not item.weight.numel()]
        for item in items:
            if item.weight.numel():
                kinds.setdefault(item.kind, []).append(item)
        self.casts: list[Cast] = [
            InParts(kind, same, rank, ranks) if ranks > 1 and kind.in_parts(ranks) else Whole(kind, same)
            for kind, same in kinds.items()
        ]
        self._shares = Shares(items, rank, ranks)
        self._pieces = sorted((p for cast in self.casts for p in cast.pieces()), key=lambda p: p.weight)
        self._shapes: list[list[torch.Size]] = []

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> list[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | list[Piece]:
        return self._pieces[index]

    def __len__(self) -> int:
        return len(self._pieces)

    def tell(self) -> Tensor:
        """What this rank tells the others, for a MAX over the ranks."""
        told = [[self._shares.tell()], *(cast.tell() for cast in self.casts)]
        self._shapes = [[t.shape for t in each] for each in told]
        return torch.cat([t.flatten() for each in told for t in each])

    def encode(self, told: Tensor) -> None:
        """Write what this rank can write, from what all ranks told."""
        sizes = [shape.numel() for shapes in self._shapes for shape in shapes]
        parts = iter(torch.split(told, sizes))
        shares, *rest = [[next(parts).view(shape) for shape in shapes] for shapes in self._shapes]
        self._shares.check(shares[0])
        for cast, each in zip(self.casts, rest, strict=True):
            cast.encode(each)
        for item in self._without_elements:  # as any rank can
            item.weight.copy_(torch.empty(item.weight.shape, device=item.weight.device))


def cast_master_weights(
    weights: Sequence[QuantizedTensor],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int],
    group: ProcessGroup | None,
    *,
    states: Sequence[Mapping[str, Tensor] | None] | None = None,
    seed: Tensor | int | None = None,
) -> Pieces:
    """Write what this rank owns of the masters into the quantized weights, with one all-reduce for all of them.

    ``masters[i]`` (fp32, 1-D; empty or None if this rank owns nothing of it) are the elements of the flattened
    weight ``i`` from ``offsets[i]`` on; the ranks of ``group`` together own each element once. Every rank passes
    the same weights. Afterwards each has all scales and the codes of what it owns. Gather the pieces that are
    returned, that is fill each ``piece.buffer`` from the ``piece.own`` of all ranks, and call ``finish_gather``.

    ``states[i]`` is what delayed scaling remembers of weight ``i``; it is updated. ``seed``, the same on all ranks,
    is for stochastic rounding: weight ``i`` rounds as with ``seed + i``.

    Weights of one shape and quantizer are cast together, up to 2^26 elements at a time.

    A weight with an operand in a rotated basis is dearer: its fp32 elements are in the all-reduce, and each rank
    encodes all of it. So it has no pieces.
    """
    import torch.distributed as dist

    rank, ranks = _place(group)
    items = items_of(weights, masters, offsets, states, seed, ranks)
    with _reference(items):
        pieces = Pieces(items, rank, ranks)
        told = pieces.tell()
        if ranks > 1 and len(told):
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        pieces.encode(told)
    return pieces


def finish_gather(pieces: Pieces, only: Collection[int] | None = None) -> None:
    """Write the operands that follow from what was gathered, of all weights that were cast, or only of some."""
    for cast in pieces.casts:
        chosen = [i for i, item in enumerate(cast.items) if only is None or item.index in only]
        with _reference([cast.items[i] for i in chosen]):
            cast.finish(chosen)


@contextmanager
def _reference(items: Sequence[Item]) -> Iterator[None]:
    """What formats wrote runs in the precision in which it is written, and autograd sees only that weights changed."""
    device = items[0].weight.device.type if items else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        yield
    for item in items:
        if not item.weight.is_inference():
            torch.autograd.graph.increment_version(item.weight)


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    """This rank's place in the group, and how many there are."""
    import torch.distributed as dist

    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this rank is not in the group that shares out the masters: only its members may cast them")
    return rank, dist.get_world_size(group)
