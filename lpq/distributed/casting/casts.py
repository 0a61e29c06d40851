"""Casting what one rank owns of weights of one kind: the words that it sends to the other ranks, and its encoding.

The words of all ranks are combined by a MAX of 32-bit integers. A statistic is not negative and orders as its bits do;
for any other number, one rank writes the bits, and the others write ``NOTHING``. The simplest cast is here: it sends
all elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpq.distributed.casting import batches
from lpq.distributed.casting.fragments import Grid, Span
from lpq.distributed.casting.kinds import Item, Kind
from lpq.formats import Storage
from lpq.formats.format import Direction
from lpq.operations.operands import recall
from lpq.torch_private.operators import copy_each

NOTHING = torch.iinfo(torch.int32).min


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


Views = Mapping[Kind, Sequence[Tensor]]
"""The words that the ranks exchange about the weights of each kind: int32, of the shapes ``Kind.told``."""


class Cast(ABC):
    """The cast of some weights."""

    items: Sequence[Item]

    @abstractmethod
    def tell(self, told: Views) -> None:
        """Write the words of this rank, over zeros."""

    @abstractmethod
    def encode(self, told: Views) -> None:
        """Write what this rank can write, from the words of all ranks."""

    def pieces(self) -> list[Piece]:
        """The pieces that have to be gathered after that."""
        return []

    @abstractmethod
    def finish(self, chosen: Sequence[int]) -> None:
        """Write the operands of these weights that follow from gathered bytes."""


class OfOneKind(Cast):
    """The cast of the weights of one kind by the code of their format."""

    def __init__(self, kind: Kind, items: Sequence[Item]) -> None:
        self.kind, self.items = kind, items
        self.device = items[0].weight.device
        self.rows = dense_operands("row", kind, items) if kind.row is not None else []

    def finish(self, chosen: Sequence[int]) -> None:
        kind = self.kind
        for part in self._batches(chosen):
            apart = [i for i in part if kind.holds_row and self.rows[i] is not self.items[i].weight.row]
            if apart:
                write(self._held("row", apart), enumerate(_stacked([self.rows[i] for i in apart])))
            if kind.derives:
                made = batches.derive_col(
                    kind.quantizer, _stacked([self.rows[i] for i in part]), (kind.rows, kind.cols), kind.dtype,
                    self._seeds(part), together=self._together(part),
                )  # fmt: skip
                write(self._held("col", part), enumerate(made))

    # ------------------------------------------------------------------------------ what both ways have in common

    def _held(self, direction: Direction, which: Iterable[int]) -> list[Storage]:
        return held(direction, [self.items[i] for i in which])

    def _encoded(self, direction: Direction, which: Iterable[int]) -> list[Storage]:
        """The operands that are encoded for these weights."""
        return [self.rows[i] for i in which] if direction == "row" else self._held("col", which)

    def _batches(self, which: Sequence[int]) -> Iterator[Sequence[int]]:
        """These weights in batches of as many as fit."""
        count = max(1, batches.MOST // (self.kind.rows * self.kind.cols))
        return (which[at : at + count] for at in range(0, len(which), count))

    def _together(self, which: Sequence[int]) -> bool:
        return self.kind.together and len(which) > 1

    def _seeds(self, which: Sequence[int]) -> Tensor | None:
        seeds = [self.items[i].seed for i in which]
        return torch.stack([s for s in seeds if s is not None]) if self.kind.stochastic else None

    def _known(self) -> list[Tensor | None]:
        """The statistics that states remember, to encode with, in the order of the kind's; None: those measured."""
        kind = self.kind
        if not kind.remembers:
            return [None for _ in kind.stats]
        recalled = [recall(kind.quantizer, kind.row, kind.col, item.state) for item in self.items if item.state]
        known: list[Tensor | None] = []
        for same in zip(*recalled, strict=True):
            held = [stat for stat in same if stat is not None]
            known.append(torch.stack(held) if held else None)
        return known

    def _remember(self, measured: Sequence[Tensor]) -> None:
        remember(self.kind, self.items, measured)


class OnEveryRank(OfOneKind):
    """A cast in which each rank gets all elements and encodes everything. There is nothing to gather."""

    def tell(self, told: Views) -> None:
        if not told[self.kind]:  # there is nobody else
            return
        elements = told[self.kind][0].fill_(NOTHING)
        owned = [i for i, item in enumerate(self.items) if len(item.values)]
        copy([elements[i, slice(*self.items[i].span)] for i in owned], [as_bits(self.items[i].values) for i in owned])

    def encode(self, told: Views) -> None:
        kind = self.kind
        elements = told[kind][0].view(torch.float32) if told[kind] else torch.stack([i.values for i in self.items])
        x = elements.view(-1, kind.rows, kind.cols)
        known, measured = self._known(), []
        for part in self._batches(range(len(self.items))):
            taken, together = slice(part[0], part[-1] + 1), self._together(part)
            stats = batches.measure(x[taken], kind.row, kind.col, together=together)
            measured.append(stats)
            used = [s if k is None else k[taken] for s, k in zip(stats, known, strict=True)]
            made = batches.encode(x[taken], used, kind.row, kind.col, self._seeds(part), together=together)
            for direction, side in kind.sides:
                count = len(side.layout)
                write(self._encoded(direction, part), enumerate(made[:count]))
                made = made[count:]
        self._remember([torch.cat(same) for same in zip(*measured, strict=True)])


def dense_operands(direction: Direction, kind: Kind, items: Sequence[Item]) -> list[Storage]:
    """The operands that are encoded: the weights' own, unless that is absent or strided."""
    side = kind.quantizer.side(direction)
    shape = (kind.rows, kind.cols) if direction == "row" else (kind.cols, kind.rows)
    found: list[Storage] = []
    for item in items:
        own = item.weight.row if direction == "row" else item.weight.col
        if own is None or not all(t.is_contiguous() for t in own.tensors()):
            own = side.storage.empty(side, shape, kind.dtype, item.weight.device)
        found.append(own)
    return found


def held(direction: Direction, items: Iterable[Item]) -> list[Storage]:
    """The operands that these weights hold."""
    operands = [item.weight.row if direction == "row" else item.weight.col for item in items]
    return [operand for operand in operands if operand is not None]


def remember(kind: Kind, items: Sequence[Item], measured: Sequence[Tensor]) -> None:
    """Take the statistics of the whole weights, a stack of each, into the states."""
    states = [item.state for item in items if item.state is not None]
    if not kind.remembers:
        return
    stacks = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    after = batches.remember(
        kind.quantizer, stacks, measured, row=kind.row is not None, col=kind.col is not None,
        together=kind.together and len(states) > 1,
    )  # fmt: skip
    for name, stack in zip(stacks, after, strict=True):
        copy([state[name] for state in states], stack.unbind())


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in one launch."""
    if targets:
        copy_each(list(targets), list(sources))


def write(operands: Sequence[Storage], buffers: Iterable[tuple[int, Tensor]]) -> None:
    """Write stacks of buffers, by their place in the layout, to operands."""
    for j, stack in buffers:
        copy([operand.tensors()[j] for operand in operands], stack.unbind())


def _stacked(operands: Sequence[Storage]) -> list[Tensor]:
    """The buffers of many operands, one stack of each."""
    return [torch.stack(same) for same in zip(*(operand.tensors() for operand in operands), strict=True)]
