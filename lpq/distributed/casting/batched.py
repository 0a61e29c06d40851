"""A cast of all weights at once that kernels of the table serve, whatever their shapes.

Each operand of each fragment is a row of a table. One launch measures all fragments; after the reduction one makes the
scales of the whole weights, and one the codes of the fragments. The ranks exchange the same words as without such
kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.distributed.casting.casts import Cast, Part, Views, dense, remember
from lpq.distributed.casting.fragments import Span
from lpq.distributed.casting.kinds import HEAD, Item, Kind
from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.formats.layout import Block
from lpq.kernels import KernelError, choose
from lpq.kernels.fragments import (
    SEND,
    TURN,
    CastKernels,
    Fragment,
    SentWords,
    Table,
    Turned,
    fragment_table,
    sent_table,
    turned_table,
)

WORD = 4
"""Bytes of a word that is exchanged, of a statistic and of a factor."""
MEASURE, SCALES, CODES = range(3)
"""The kernels that read a table of fragments."""


def serves(kind: Kind, device: torch.device) -> bool:
    """Whether there are kernels for all operands of weights of this kind."""
    served = [kernels_of(side, device) for _, side in kind.sides]
    if None in served:
        return False
    return not kind.derives or (kind.quantizer.col_source == "original" and all(k.turned for k in served if k))


def kernels_of(side: Quantizer, device: torch.device) -> CastKernels | None:
    """The kernels that cast fragments to operands of this quantizer, if there are any."""
    try:
        make = choose("cast", (side.text,), device).impl
    except KernelError:  # the reference is not allowed: the other way raises with what each operation lacks
        return None
    kernels: CastKernels | None = make(side) if make is not None else None
    return kernels


class Group(NamedTuple):
    """Operands that the same kernels make."""

    side: Quantizer
    direction: Direction
    in_parts: bool
    """Whether it is of fragments, and not of whole weights whose elements all ranks have."""

    @property
    def block(self) -> Block:
        """Rows and columns of the weight that a scale covers."""
        down, across = self.side.stats[-1].block
        return (down, across) if self.direction == "row" else (across, down)

    def launch(self, which: int, table: Table) -> None:
        """Run one of the kernels for all these operands."""
        kernels = kernels_of(self.side, table.rows.device)
        assert kernels is not None
        kernel = (kernels.measure, kernels.scales, kernels.codes)[which]
        table.launch(kernel, kernels.compiled_for(self.block, col=self.direction == "col"), which)


class ServedPart(Part):
    """The weights of one kind, as the tables have them."""

    def __init__(self, kind: Kind, items: Sequence[Item], ranks: int) -> None:
        super().__init__(kind, items, ranks)
        if kind.holds_col:
            self.operands["col"] = [dense("col", kind, item) for item in items]
        self.values = [item.values.contiguous() for item in items]
        counts = {d: kind.stats[kind.stats_of(d)][-1].count * len(items) for d, _ in kind.sides}
        self.factors = {
            d: torch.empty(n, dtype=torch.float32, device=items[0].weight.device) for d, n in counts.items()
        }
        """A number for each scale, which the kernel of the codes takes from that of the scales."""

    def span(self, i: int) -> Span:
        """The elements of weight ``i`` that this rank encodes."""
        return self.items[i].span if self.in_parts else (0, self.size)

    def laid(self, which: Iterable[int]) -> Iterator[Turned]:
        """Table rows that make column operands from codes in the order of the weight."""
        for i in which:
            for direction, j, grid, flat in self.coded:
                if direction == "col":
                    to = self.operands["col"][i].tensors()[j]
                    yield Turned(flat[i].data_ptr(), to.data_ptr(), *grid.shape, 8 * to.itemsize)

    def derived(self, which: Iterable[int]) -> Iterator[Turned]:
        """Table rows that make column operands from row operands."""
        kind = self.kind
        if not kind.derives:
            return
        kernels = kernels_of(kind.sides[0][1], self.items[0].weight.device)
        assert kernels is not None
        for i in which:
            operands = self.operands["row"][i].tensors(), self.operands["col"][i].tensors()
            for source, to, bits in zip(*operands, kernels.turned, strict=True):
                rows, columns = (kind.rows, kind.cols) if bits == 4 else (source.shape or (1, 1))
                yield Turned(source.data_ptr(), to.data_ptr(), rows, columns, bits)


class Batched(Cast):
    """The cast of weights of many kinds."""

    def __init__(self, kinds: Mapping[Kind, Sequence[Item]], rank: int, ranks: int) -> None:
        self.served = [ServedPart(kind, items, ranks) for kind, items in kinds.items()]
        super().__init__(self.served, rank)
        self.ranks = ranks
        self.places = [(part, i) for part in self.served for i in range(len(part.items))]
        self._tables: dict[Group, Table] = {}
        self._words_at = -1

    def write_words(self, words: Views) -> None:
        if sent := list(self._sent(words)):
            sent_table(sent, self.device).launch(SEND)
        for group, table in self._fragments(words).items():
            if group.in_parts:
                group.launch(MEASURE, table)

    def encode(self, words: Views) -> None:
        tables = self._fragments(words)
        for group, table in tables.items():
            if not group.in_parts:
                group.launch(MEASURE, table)
            group.launch(SCALES, table)
            group.launch(CODES, table)
        _turn([t for p in self.served if not p.in_parts for t in p.laid(range(len(p.items)))], self.device)
        self._remember(words)
        self._tables, self._words_at = {}, -1
        for part in self.served:
            part.factors.clear()

    def finish(self, chosen: Sequence[int]) -> None:
        which: dict[ServedPart, list[int]] = {}
        for part, i in (self.places[n] for n in chosen):
            which.setdefault(part, []).append(i)
        turned = [t for part, same in which.items() if part.in_parts for t in part.laid(same)]
        _turn([*turned, *(t for part, same in which.items() for t in part.derived(same))], self.device)
        for part, same in which.items():
            part.write_strided(same)

    # ------------------------------------------------------------------------------ tables

    def _sent(self, words: Views) -> Iterator[SentWords]:
        """The elements that this rank sends: all, or those that share codes with elements of others."""
        for part in self.served:
            kind = part.kind
            if not (part.exchanged or (part.in_parts and kind.reach)):
                continue
            reach, size = (-1, part.size) if part.exchanged else (kind.reach, self.ranks * (HEAD + 2 * kind.reach))
            at = words[kind][-1].data_ptr()
            for i, item in enumerate(part.items):
                to = at + i * size * WORD
                yield SentWords(part.values[i].data_ptr(), to, *item.span, kind.cols, reach, self.rank, size)

    def _fragments(self, words: Views) -> dict[Group, Table]:
        """All operands that are encoded."""
        words_at = next((stacks[0].data_ptr() for stacks in words.values() if stacks), 0)
        if words_at != self._words_at:
            groups: dict[Group, list[Fragment]] = {}
            for part in self.served:
                for direction, side in part.kind.sides:
                    group = groups.setdefault(Group(side, direction, part.in_parts), [])
                    group += self._operands(part, direction, words[part.kind])
            self._tables = {group: fragment_table(rows, group.block, self.device) for group, rows in groups.items()}
            self._words_at = words_at
        return self._tables

    def _operands(self, part: ServedPart, direction: Direction, words: Sequence[Tensor]) -> Iterator[Fragment]:
        """One operand of each weight."""
        kind, at = part.kind, part.kind.stats_of(direction)
        ((codes, flat),) = ((grid, flat) for d, _, grid, flat in part.coded if d == direction)
        ends = words[-1].data_ptr() if part.in_parts and kind.reach else 0
        elements, factors = words[-1].data_ptr() if part.exchanged else 0, part.factors[direction].data_ptr()
        for i in range(len(part.items)):
            start, stop = part.span(i)
            measured = [stack[i].data_ptr() for stack in words[at]]
            used = [own if k is None else k.data_ptr() for own, k in zip(measured, part.known[i][at], strict=True)]
            _, scales, *kept = part.operands[direction][i].tensors()
            yield Fragment(
                values=elements + i * part.size * WORD if elements else part.values[i].data_ptr(),
                codes=flat[i].data_ptr(),
                scales=scales.data_ptr(),
                kept=kept[0].data_ptr() if kept else 0,
                amaxes=measured[-1],
                overall=measured[0],
                used_amaxes=used[-1],
                used_overall=used[0],
                factors=factors + i * kind.stats[at][-1].count * WORD,
                ends=ends + i * self.ranks * (HEAD + 2 * kind.reach) * WORD if ends else 0,
                reach=kind.reach,
                ranks=self.ranks,
                rows=kind.rows,
                cols=kind.cols,
                start=start,
                stop=stop,
                codes_start=codes.holding(start) if start < stop else 0,
                codes_stop=codes.before(stop) if start < stop else 0,
                width=codes.shape[1],
            )

    def _remember(self, words: Views) -> None:
        """States do not depend on shapes, so that one update serves those of all kinds that have equal statistics."""
        alike: dict[object, list[ServedPart]] = {}
        for part in self.served:
            kind = part.kind
            if kind.remembers:
                shapes = tuple(grid.shape for grid in kind.stats)
                alike.setdefault((kind.quantizer, kind.row, kind.col, shapes), []).append(part)
        for parts in alike.values():
            items = [item for part in parts for item in part.items]
            measured = [
                [grid.lift(s.view(torch.float32)) for grid, s in zip(part.kind.stats, words[part.kind], strict=False)]
                for part in parts
            ]
            remember(parts[0].kind, items, [torch.cat(same) for same in zip(*measured, strict=True)])


def _turn(turned: Sequence[Turned], device: torch.device) -> None:
    """Make column operands, in one launch."""
    if turned:
        turned_table(turned, device).launch(TURN)
