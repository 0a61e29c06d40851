"""Casting what one rank owns of weights of one kind: what it tells the other ranks, and what it encodes then.

What ranks tell is combined by a MAX of 32-bit integers. A statistic is not negative and orders as its bits do; of any
other number one rank says the bits, and the others say ``NOTHING``. The simplest cast is here: everything is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpq.core import Storage
from lpq.core.quantize import recall
from lpq.core.quantizer import Direction
from lpq.distributed.casting import batches
from lpq.distributed.casting.fragments import Grid, Span, layout
from lpq.distributed.casting.kinds import Item, Kind

NOTHING = torch.iinfo(torch.int32).min


@dataclass(frozen=True, eq=False)
class Piece:
    """A buffer of a weight that has to be gathered, and what this rank has written of it.

    The pieces of all ranks make up the buffer, in the order of their fragments. Where two fragments share an element
    of the buffer it belongs to the piece of the first; the other rank writes it as well, and alike.
    """

    weight: int
    """Its weight: the place in the list that was cast."""
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
        """What this rank has to send."""
        return self.buffer[self.start : self.stop]

    def span(self, start: int, stop: int) -> Span:
        """What is the piece of a rank that owns elements ``[start, stop)`` of the flattened weight."""
        return self.grid.before(start), self.grid.before(stop)


class Cast(ABC):
    """The cast of the weights of one kind."""

    def __init__(self, kind: Kind, items: Sequence[Item]) -> None:
        self.kind, self.items = kind, items
        self.device = items[0].weight.device
        self.rows = [self._row_operand(item) for item in items] if kind.row is not None else []
        """The row operands that are encoded: the weights' own, unless that is absent or strided."""

    @abstractmethod
    def tell(self) -> list[Tensor]:
        """What this rank tells the others: int32, of the same shapes on all ranks."""

    @abstractmethod
    def encode(self, told: Sequence[Tensor]) -> None:
        """Write what this rank can write, from what all ranks told together."""

    def pieces(self) -> list[Piece]:
        """What has to be gathered after that."""
        return []

    def finish(self, chosen: Sequence[int]) -> None:
        """Write what follows from what was gathered, of these of the weights."""
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

    def _row_operand(self, item: Item) -> Storage:
        kind, held = self.kind, item.weight.row
        if held is not None and all(t.is_contiguous() for t in held.tensors()):
            return held
        assert kind.row is not None
        return kind.row.storage.empty(kind.row, (kind.rows, kind.cols), kind.dtype, self.device)

    def _held(self, direction: Direction, which: Iterable[int]) -> list[Storage]:
        """The operands that these weights hold."""
        weights = [self.items[i].weight for i in which]
        operands = [weight.row if direction == "row" else weight.col for weight in weights]
        return [operand for operand in operands if operand is not None]

    def _encoded(self, direction: Direction, which: Iterable[int]) -> list[Storage]:
        """The operands that are encoded for these weights."""
        return [self.rows[i] for i in which] if direction == "row" else self._held("col", which)

    def _batches(self, which: Sequence[int]) -> Iterator[Sequence[int]]:
        """As many whole weights at a time as fit."""
        count = max(1, batches.MOST // (self.kind.rows * self.kind.cols))
        return (which[at : at + count] for at in range(0, len(which), count))

    def _together(self, which: Sequence[int]) -> bool:
        return self.kind.together and len(which) > 1

    def _seeds(self, which: Sequence[int]) -> Tensor | None:
        seeds = [self.items[i].seed for i in which]
        return torch.stack([s for s in seeds if s is not None]) if self.kind.stochastic else None

    def _known(self) -> list[Tensor | None]:
        """The statistics to encode with that states remember, in the order of the kind's; None: those measured."""
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
        """Take the statistics of the whole weights into the states."""
        kind = self.kind
        states = [item.state for item in self.items if item.state is not None]
        if not kind.remembers:
            return
        stacks = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        after = batches.remember(
            kind.quantizer, stacks, measured, row=kind.row is not None, col=kind.col is not None,
            together=self._together(range(len(states))),
        )  # fmt: skip
        for name, stack in zip(stacks, after, strict=True):
            copy([state[name] for state in states], stack.unbind())


class Whole(Cast):
    """Each rank is told all elements, and encodes everything. There is nothing to gather."""

    def tell(self) -> list[Tensor]:
        size = self.kind.rows * self.kind.cols
        elements = torch.full((len(self.items), size), NOTHING, dtype=torch.int32, device=self.device)
        owned = [i for i, item in enumerate(self.items) if len(item.values)]
        copy([elements[i, slice(*self.items[i].span)] for i in owned], [as_bits(self.items[i].values) for i in owned])
        return [elements]

    def encode(self, told: Sequence[Tensor]) -> None:
        kind = self.kind
        x = told[0].view(torch.float32).view(-1, kind.rows, kind.cols)
        known, measured = self._known(), []
        for part in self._batches(range(len(self.items))):
            taken, together = slice(part[0], part[-1] + 1), self._together(part)
            stats = batches.measure(x[taken], kind.row, kind.col, together=together)
            measured.append(stats)
            used = [s if k is None else k[taken] for s, k in zip(stats, known, strict=True)]
            made = batches.encode(x[taken], used, kind.row, kind.col, self._seeds(part), together=together)
            for direction, side in kind.sides:
                count = len(layout(side))
                write(self._encoded(direction, part), enumerate(made[:count]))
                made = made[count:]
        self._remember([torch.cat(same) for same in zip(*measured, strict=True)])


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in one launch."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def write(operands: Sequence[Storage], buffers: Iterable[tuple[int, Tensor]]) -> None:
    """Write stacks of buffers, by their place in the layout, to operands."""
    for j, stack in buffers:
        copy([operand.tensors()[j] for operand in operands], stack.unbind())


def _stacked(operands: Sequence[Storage]) -> list[Tensor]:
    """The buffers of many operands, one stack of each."""
    return [torch.stack(same) for same in zip(*(operand.tensors() for operand in operands), strict=True)]
