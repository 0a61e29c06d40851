"""Casting all weights at once that kernels of the table serve, whatever their shapes.

Each operand of each fragment is a row of a table. One launch measures all fragments; after the reduction one makes the
scales of the whole weights, and one the codes of the fragments. The ranks exchange the same words as without such
kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.distributed.casting.casts import Cast, Piece, Views, copy, dense_operands, remember
from lpq.distributed.casting.fragments import Grid, Span
from lpq.distributed.casting.kinds import HEAD, Item, Kind
from lpq.distributed.casting.parts import coded_buffers, pieces_of
from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.formats.layout import Block
from lpq.kernels import KernelError, choose
from lpq.kernels.fragments import (
    TELL,
    TURN,
    CastKernels,
    Fragment,
    Table,
    Told,
    Turned,
    fragment_table,
    told_table,
    turned_table,
)
from lpq.operations.operands import recall

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
    except KernelError:  # the reference is not allowed: each operation of the other way says for itself what it lacks
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


class Part:
    """The weights of one kind."""

    def __init__(self, kind: Kind, items: Sequence[Item], ranks: int) -> None:
        self.kind, self.items, self.size = kind, items, kind.rows * kind.cols
        self.in_parts = kind.in_parts(ranks)
        self.told = ranks > 1 and not self.in_parts
        """Whether the ranks exchange all elements."""
        self.operands = {
            "row": dense_operands("row", kind, items) if kind.row is not None else [],
            "col": dense_operands("col", kind, items) if kind.holds_col else [],
        }
        self.coded = coded_buffers(kind, items, self.operands["row"])
        self.values = [item.values.contiguous() for item in items]
        self.known = [_known(kind, item) for item in items]

    def span(self, i: int) -> Span:
        """The elements of weight ``i`` that this rank encodes."""
        return self.items[i].span if self.in_parts else (0, self.size)

    def turned(self, which: Iterable[int], *, derived: bool) -> Iterator[Turned]:
        """Table rows that make column operands: from row operands, or from codes of their own in the weight's order."""
        kind, cols = self.kind, self.operands["col"]
        kernels = kernels_of(kind.sides[0][1], self.items[0].weight.device)
        for i in which:
            if derived and kind.derives:
                assert kernels is not None
                pairs = zip(self.operands["row"][i].tensors(), cols[i].tensors(), kernels.turned, strict=True)
                for source, to, bits in pairs:
                    rows, columns = (kind.rows, kind.cols) if bits == 4 else (source.shape or (1, 1))
                    yield Turned(source.data_ptr(), to.data_ptr(), rows, columns, bits)
            for direction, j, grid, flat in () if derived else self.coded:
                if direction == "col":
                    to = cols[i].tensors()[j]
                    yield Turned(flat[i].data_ptr(), to.data_ptr(), *grid.shape, 8 * to.itemsize)

    def write_strided(self, which: Iterable[int]) -> None:
        """Copy operands to weights that hold them in another memory layout."""
        for i in which:
            weight = self.items[i].weight
            for held, made in ((weight.row, self.operands["row"]), (weight.col, self.operands["col"])):
                if held is not None and held is not made[i]:
                    copy(held.tensors(), made[i].tensors())


class Batched(Cast):
    """The cast of weights of many kinds."""

    def __init__(self, kinds: Mapping[Kind, Sequence[Item]], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.parts = [Part(kind, items, ranks) for kind, items in kinds.items()]
        self.places = [(part, i) for part in self.parts for i in range(len(part.items))]
        self.items = [item for part in self.parts for item in part.items]
        self.device = self.items[0].weight.device
        self.measured = self._own_statistics()
        count = sum(self._blocks(part) * len(part.items) for part in self.parts)
        self.factors = torch.empty(count, dtype=torch.float32, device=self.device)
        self._tables: dict[Group, Table] = {}
        self._told_at = -1

    def pieces(self) -> list[Piece]:
        return [piece for part in self.parts if part.in_parts for piece in pieces_of(part.items, part.coded)]

    def tell(self, told: Views) -> None:
        if said := list(self._said(told)):
            told_table(said, self.device).launch(TELL)
        for group, table in self._fragments(told).items():
            if group.in_parts:
                group.launch(MEASURE, table)

    def encode(self, told: Views) -> None:
        tables = self._fragments(told)
        for group, table in tables.items():
            if not group.in_parts:
                group.launch(MEASURE, table)
            group.launch(SCALES, table)
            group.launch(CODES, table)
        self._turn((part, range(len(part.items))) for part in self.parts if not part.in_parts)
        self._remember(told)
        self._tables, self._told_at, self.factors = {}, -1, self.factors.new_empty(0)

    def finish(self, chosen: Sequence[int]) -> None:
        which: dict[Part, list[int]] = {}
        for part, i in (self.places[n] for n in chosen):
            which.setdefault(part, []).append(i)
        self._turn(((part, same) for part, same in which.items() if part.in_parts), derived=which.items())
        for part, same in which.items():
            part.write_strided(same)

    # ------------------------------------------------------------------------------ tables

    def _said(self, told: Views) -> Iterator[Told]:
        """The elements that this rank sends: all, or those that share codes with elements of others."""
        for part in self.parts:
            kind = part.kind
            if not (part.told or (part.in_parts and kind.reach)):
                continue
            reach, words = (-1, part.size) if part.told else (kind.reach, self.ranks * (HEAD + 2 * kind.reach))
            at = told[kind][-1].data_ptr()
            for i, item in enumerate(part.items):
                to = at + i * words * WORD
                yield Told(part.values[i].data_ptr(), to, *item.span, kind.cols, reach, self.rank, words)

    def _fragments(self, told: Views) -> dict[Group, Table]:
        """All operands that are encoded."""
        told_at = next((stacks[0].data_ptr() for stacks in told.values() if stacks), 0)
        if told_at != self._told_at:
            groups: dict[Group, list[Fragment]] = {}
            factors = self.factors.data_ptr()
            for part in self.parts:
                first = 0
                for direction, side in part.kind.sides:
                    group = groups.setdefault(Group(side, direction, part.in_parts), [])
                    grids = part.kind.stats[first : first + len(side.stats)]
                    group += self._operands(part, direction, grids, first, told[part.kind], factors)
                    factors += grids[-1].count * len(part.items) * WORD
                    first += len(side.stats)
            self._tables = {group: fragment_table(rows, group.block, self.device) for group, rows in groups.items()}
            self._told_at = told_at
        return self._tables

    def _operands(
        self, part: Part, direction: Direction, grids: Sequence[Grid], first: int, told: Sequence[Tensor], factors: int
    ) -> Iterator[Fragment]:
        """One operand of each weight. ``first``: the place of its first statistic among the kind's."""
        kind = part.kind
        ((codes, flat),) = ((grid, flat) for d, _, grid, flat in part.coded if d == direction)
        ends = told[-1].data_ptr() if part.in_parts and kind.reach else 0
        stats = [stack.data_ptr() for stack in (told if part.in_parts else self.measured[kind])[first:]]
        elements, width = told[0].data_ptr() if part.told else 0, codes.shape[1]
        for i in range(len(part.items)):
            start, stop = part.span(i)
            where = [at + i * grid.count * WORD for at, grid in zip(stats, grids, strict=False)]
            known = part.known[i][first : first + len(grids)] or [None] * len(grids)
            used = [at if k is None else k.data_ptr() for at, k in zip(where, known, strict=True)]
            _, scales, *kept = part.operands[direction][i].tensors()
            yield Fragment(
                values=elements + i * part.size * WORD if elements else part.values[i].data_ptr(),
                codes=flat[i].data_ptr(),
                scales=scales.data_ptr(),
                kept=kept[0].data_ptr() if kept else 0,
                amaxes=where[-1],
                overall=where[0],
                used_amaxes=used[-1],
                used_overall=used[0],
                factors=factors + i * grids[-1].count * WORD,
                ends=ends + i * self.ranks * (HEAD + 2 * kind.reach) * WORD if ends else 0,
                reach=kind.reach,
                ranks=self.ranks,
                rows=kind.rows,
                cols=kind.cols,
                start=start,
                stop=stop,
                codes_start=codes.holding(start) if start < stop else 0,
                codes_stop=codes.before(stop) if start < stop else 0,
                width=width,
            )

    def _turn(
        self,
        coded: Iterable[tuple[Part, Iterable[int]]],
        derived: Iterable[tuple[Part, Iterable[int]]] = (),
    ) -> None:
        """Make column operands, in one launch."""
        turned = [one for part, which in coded for one in part.turned(which, derived=False)]
        turned += [one for part, which in derived for one in part.turned(which, derived=True)]
        if turned:
            turned_table(turned, self.device).launch(TURN)

    # ------------------------------------------------------------------------------ statistics

    def _own_statistics(self) -> dict[Kind, list[Tensor]]:
        """Zeros for the statistics of weights that are measured whole."""
        shapes = {
            part.kind: [(len(part.items), *grid.shape) for grid in part.kind.stats]
            for part in self.parts
            if not part.in_parts
        }
        sizes = [torch.Size(shape).numel() for same in shapes.values() for shape in same]
        zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        rest = iter(torch.split(zeros, sizes))
        return {kind: [next(rest).view(shape) for shape in same] for kind, same in shapes.items()}

    @staticmethod
    def _blocks(part: Part) -> int:
        """Scales of all operands of a weight."""
        kind, blocks, first = part.kind, 0, 0
        for _, side in kind.sides:
            first += len(side.stats)
            blocks += kind.stats[first - 1].count
        return blocks

    def _remember(self, told: Views) -> None:
        """States do not depend on shapes, so that one update serves those of all kinds that have equal statistics."""
        alike: dict[object, list[Part]] = {}
        for part in self.parts:
            kind = part.kind
            if kind.remembers:
                shapes = tuple(grid.shape for grid in kind.stats)
                alike.setdefault((kind.quantizer, kind.row, kind.col, shapes), []).append(part)
        for parts in alike.values():
            items = [item for part in parts for item in part.items]
            measured: list[list[Tensor]] = []
            for part in parts:
                stacks = told[part.kind] if part.in_parts else self.measured[part.kind]
                grids = part.kind.stats
                measured.append([g.lift(s.view(torch.float32)) for g, s in zip(grids, stacks, strict=False)])
            remember(parts[0].kind, items, [torch.cat(same) for same in zip(*measured, strict=True)])


def _known(kind: Kind, item: Item) -> list[Tensor | None]:
    """The statistics to encode a weight with that its state remembers; None or nothing: those measured."""
    if item.state is None:
        return []
    recalled = recall(kind.quantizer, kind.row, kind.col, item.state)
    return [None if stat is None else stat.contiguous() for stat in recalled]
