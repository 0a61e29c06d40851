"""Master weights that ranks share out: cast to quantized weights that every rank holds whole.

As in ZeRO: each rank owns a piece of each flattened fp32 master, anywhere, of any length. One collective for all
weights brings every rank the facts that it needs from the others; then each rank has all scales and encodes its piece.
Once the bytes are gathered, every buffer has, bit for bit, the bytes of the encoded whole master.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lpq.distributed.casting.agreement import Agreement
from lpq.distributed.casting.batched import Batched, serves
from lpq.distributed.casting.casts import Cast, Piece, Views
from lpq.distributed.casting.given import items_of
from lpq.distributed.casting.kinds import Item, Kind
from lpq.distributed.casting.reference import Reference
from lpq.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Piece", "Pieces", "cast_master_weights", "finish_gather"]


class Pieces(list[Piece]):
    """The pieces to gather after a cast: those of the same buffers on all ranks, in the same order."""

    def __init__(self, items: Sequence[Item], rank: int, ranks: int) -> None:
        kinds: dict[Kind, list[Item]] = {}
        self._without_elements = [item for item in items if not item.weight.numel()]
        for item in items:
            if item.weight.numel():
                kinds.setdefault(item.kind, []).append(item)
        self.casts = casts(kinds, rank, ranks)
        self._agreement = Agreement(items, rank, ranks)
        pieces = (piece for cast in self.casts for part in cast.parts for piece in part.pieces())
        super().__init__(sorted(pieces, key=lambda piece: piece.weight))
        self._shapes = {kind: kind.words(len(same), ranks) for kind, same in kinds.items()}

    def tell(self) -> Tensor:
        """The words that this rank sends to the others, for a MAX over the ranks."""
        count = sum(math.prod(shape) for shapes in self._all_shapes for shape in shapes)
        words = torch.zeros(count, dtype=torch.int32, device=self._agreement.device)
        agreement, views = self._views(words)
        self._agreement.write(*agreement)
        for cast in self.casts:
            cast.write_words(views)
        return words

    def encode(self, words: Tensor) -> None:
        """Write the buffers, or the parts of them, that this rank can write, from the words of all ranks."""
        agreement, views = self._views(words)
        self._agreement.check(*agreement)
        for cast in self.casts:
            cast.encode(views)
        for item in self._without_elements:  # as any rank can
            item.weight.copy_(torch.empty(item.weight.shape, device=item.weight.device))

    @property
    def _all_shapes(self) -> list[list[tuple[int, ...]]]:
        """The shapes of all that the ranks exchange, in order: first the facts that must agree, then those of each
        kind."""
        return [self._agreement.shapes, *self._shapes.values()]

    def _views(self, words: Tensor) -> tuple[list[Tensor], Views]:
        """Split what ranks exchange."""
        shapes = self._all_shapes
        parts = iter(torch.split(words, [math.prod(shape) for same in shapes for shape in same]))
        agreement, *rest = [[next(parts).view(shape) for shape in same] for same in shapes]
        return agreement, dict(zip(self._shapes, rest, strict=True))


def casts(kinds: Mapping[Kind, Sequence[Item]], rank: int, ranks: int) -> list[Cast]:
    """How weights are cast: all together that kernels serve, the others kind by kind."""
    batched = {kind: items for kind, items in kinds.items() if serves(kind, items[0].weight.device)}
    found: list[Cast] = [Batched(batched, rank, ranks)] if batched else []
    for kind, items in kinds.items():
        if kind not in batched:
            found.append(Reference(kind, items, rank, ranks))
    return found


def cast_master_weights(
    weights: Sequence[QuantizedTensor],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int],
    group: ProcessGroup | None,
    *,
    states: Sequence[Mapping[str, Tensor] | None] | None = None,
    seed: Tensor | int | None = None,
) -> Pieces:
    """Write this rank's parts of the masters into the quantized weights, with one all-reduce for all of them.

    ``masters[i]`` (fp32, 1-D; empty or None if this rank owns nothing of it) are the elements of the flattened
    weight ``i`` from ``offsets[i]`` on; the ranks of ``group`` together own each element once. Without a group this
    process owns all. Every rank passes the same weights, in the same order. Afterwards each has all scales, and the
    codes of its own elements. Gather the returned pieces: fill each ``piece.buffer`` from the ``piece.own`` of all
    ranks (``piece.span`` gives the place of a rank's part), and call ``finish_gather``.

    Before anything is written, all ranks refuse a part of a master that one of them refuses, and weights, states or
    seeds that differ between them. (Where they differ so that the all-reduce itself has another size, the backend ends
    it: gloo at once, NCCL after its timeout.)

    ``states[i]`` is the state of delayed scaling for weight ``i``; it is updated. ``seed``, the same on all ranks, is
    for stochastic rounding: weight ``i`` rounds as with ``seed + i``.

    Where the kernel table has kernels for the operation ``cast``, they serve all weights of a quantizer at once,
    whatever their shapes. Other weights are cast together if their shapes and quantizers are equal, up to 2^26
    elements at a time; of these each rank encodes the whole, with zeros for elements that it has not.

    It can be recorded in a CUDA graph, after a call that was not. A replay casts what the same masters hold then into
    the same weights, with the same random bits unless ``seed`` is a tensor that was changed. The places of the weights
    are recorded with it, as one launch more for each 22 operands.

    A weight with an operand in a rotated basis, or of a format that does not declare what follows from statistics
    (``Buffer.from_stats``), is dearer: its fp32 elements are in the all-reduce, and each rank encodes all of it. So it
    has no pieces.
    """
    import torch.distributed as dist

    rank, ranks = _place(group)
    items = items_of(weights, masters, offsets, states, seed, ranks)
    with _reference(items):
        pieces = Pieces(items, rank, ranks)
        words = pieces.tell()
        if ranks > 1 and len(words):
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
        pieces.encode(words)
    return pieces


def finish_gather(pieces: Pieces, only: Collection[int] | None = None) -> None:
    """Write the operands that follow from the gathered bytes, of all weights that were cast; with ``only``, of those at
    these places in the list of weights."""
    for cast in pieces.casts:
        chosen = [i for i, item in enumerate(cast.items) if only is None or item.index in only]
        with _reference([cast.items[i] for i in chosen]):
            cast.finish(chosen)


@contextmanager
def _reference(items: Sequence[Item]) -> Iterator[None]:
    """Run the code of formats in the precision in which it is written. Autograd gets notice of changed weights only."""
    device = items[0].weight.device.type if items else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        yield
    for item in items:
        item.weight.writes.count += 1
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
