"""Weights of one kind that ranks share out: their operands, and the words and the pieces that the ranks exchange.

The words of all ranks are combined by a MAX of 32-bit integers. A statistic is not negative and orders as its bits do;
for any other number, one rank writes the bits, and the others write ``NOTHING``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lpq.distributed.casting import stacks
from lpq.distributed.casting.fragments import Grid, Span
from lpq.distributed.casting.kinds import Item, Kind
from lpq.formats import Storage
from lpq.formats.format import Direction
from lpq.formats.sections import along
from lpq.operations.states import recall
from lpq.torch_private.operators import copy_each

NOTHING = torch.iinfo(torch.int32).min
Views = Mapping[Kind, Sequence[Tensor]]
"""The words that the ranks exchange about the weights of each kind: int32, of the shapes ``Kind.words``."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A buffer of a weight that has to be gathered, and the part of it that this rank has written.

    The pieces of all ranks make up the buffer, in the order of their fragments. Where two fragments share an element
    of the buffer it belongs to the piece of the first; the other rank writes it as well, and alike.
    """

    weight: int
    """The place of its weight in the list that was cast."""
    name: str
    """The operand and the buffer, such as ``row.data``."""
    buffer: Tensor
    """One-dimensional, in the order of the flattened weight."""
    start: int
    """The piece of this rank is ``buffer[start:stop]``."""
    stop: int
    grid: Grid

    @property
    def own(self) -> Tensor:
        """The part of the buffer that this rank has to send."""
        return self.buffer[self.start : self.stop]

    def span(self, start: int, stop: int) -> Span:
        """The piece of a rank that owns elements ``[start, stop)`` of the flattened weight: its first place in
        ``buffer`` and the place after its last."""
        return self.grid.before(start), self.grid.before(stop)


class Cast(ABC):
    """The cast of some weights."""

    def __init__(self, parts: Sequence[Part], rank: int) -> None:
        self.parts, self.rank = parts, rank
        self.items = [item for part in parts for item in part.items]
        self.device = self.items[0].weight.device

    @abstractmethod
    def write_words(self, words: Views) -> None:
        """Write the words of this rank, over zeros."""

    @abstractmethod
    def encode(self, words: Views) -> None:
        """Write the buffers, or the parts of them, that this rank can write, from the words of all ranks."""

    @abstractmethod
    def finish(self, chosen: Sequence[int]) -> None:
        """Write the operands of these weights that follow from gathered bytes."""


class Part:
    """The weights of one kind."""

    def __init__(self, kind: Kind, items: Sequence[Item], ranks: int) -> None:
        self.kind, self.items, self.size = kind, items, kind.rows * kind.cols
        self.in_parts = kind.in_parts(ranks)
        self.exchanged = ranks > 1 and not self.in_parts
        """Whether the ranks exchange all elements."""
        self.operands: dict[Direction, list[Storage]] = {
            "row": [dense("row", kind, item) for item in items] if kind.row is not None else [],
            "col": [item.weight.col for item in items if item.weight.col is not None],
        }
        self.known = [_known(kind, item) for item in items]
        """The statistics that states remember, in the order of the kind's; None: those measured are taken."""

    @cached_property
    def coded(self) -> list[tuple[Direction, int, Grid, list[Tensor]]]:
        """The buffers that depend on elements: the operand, the place in its layout, the grid, and of each weight the
        numbers in the order of the weight, which for a column operand is not that of its buffer."""
        found: list[tuple[Direction, int, Grid, list[Tensor]]] = []
        for direction, side in self.kind.sides:
            for j, grid in self.kind.coded(direction, side).items():
                buffers = [operand.tensors()[j] for operand in self.operands[direction]]
                if direction == "row":
                    flat = [buffer.view(-1) for buffer in buffers]
                else:
                    flat = list(buffers[0].new_empty((len(buffers), grid.count)).unbind())
                found.append((direction, j, grid, flat))
        return found

    def pieces(self) -> list[Piece]:
        """The pieces that have to be gathered; none where every rank has all elements."""
        found: list[Piece] = []
        for direction, _, grid, flat in self.coded if self.in_parts else ():
            name = f"{direction}.{grid.covering.name}"
            for item, buffer in zip(self.items, flat, strict=True):
                start, stop = map(grid.before, item.span)
                found.append(Piece(item.index, name, buffer, start, stop, grid))
        return found

    def write_strided(self, which: Iterable[int]) -> None:
        """Copy operands to weights that hold them in another memory layout."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for i in which:
            weight = self.items[i].weight
            for held, made in ((weight.row, self.operands["row"]), (weight.col, self.operands["col"])):
                if held is not None and held is not made[i]:
                    targets += held.tensors()
                    sources += made[i].tensors()
        copy(targets, sources)


def dense(direction: Direction, kind: Kind, item: Item) -> Storage:
    """The operand to write: the weight's own, unless that is absent or strided."""
    own = item.weight.row if direction == "row" else item.weight.col
    if own is not None and all(t.is_contiguous() for t in own.tensors()):
        return own
    side = kind.quantizer.side(direction)
    return side.storage.empty(side, along(direction, (kind.rows, kind.cols)), kind.dtype, item.weight.device)


def _known(kind: Kind, item: Item) -> list[Tensor | None]:
    if item.state is None:
        return [None] * len(kind.stats)
    recalled = recall(kind.quantizer, kind.row, kind.col, item.state)
    return [None if stat is None else stat.contiguous() for stat in recalled]


def remember(kind: Kind, items: Sequence[Item], measured: Sequence[Tensor]) -> None:
    """Take the statistics of the whole weights, a stack of each, into the states."""
    states = [item.state for item in items if item.state is not None]
    if not states:
        return
    before = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    after = stacks.remember(stacks.run_of(kind, len(states)), kind, before, measured)
    for name, stack in zip(before, after, strict=True):
        copy([state[name] for state in states], stack.unbind())


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in one launch."""
    if targets:
        copy_each(list(targets), list(sources))
