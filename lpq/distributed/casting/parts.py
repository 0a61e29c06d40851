"""Casting fragments one by one: the cast of formats that do not mix elements.

The ranks exchange the statistics of their fragments, and the few elements that share a code with one of another
fragment. Then each has all scales, and the codes of what it owns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.distributed.casting import batches
from lpq.distributed.casting.casts import NOTHING, OfOneKind, Piece, Views, as_bits, copy, held, write
from lpq.distributed.casting.fragments import Band, Grid, alignment, bands
from lpq.distributed.casting.kinds import HEAD, Item, Kind
from lpq.formats import Storage
from lpq.formats.format import Direction
from lpq.kernels.host_to_device import on_device

Coded = tuple[Direction, int, Grid, list[Tensor]]
"""A buffer that has to be gathered: its operand, its place in the layout, its grid, and the tensor of each weight."""


class InParts(OfOneKind):
    """Each rank encodes its fragments."""

    def __init__(self, kind: Kind, items: Sequence[Item], rank: int) -> None:
        super().__init__(kind, items)
        self.rank = rank
        self.buffers = coded_buffers(kind, items, self.rows)
        spans, unit = [item.span for item in items], alignment(kind.row, kind.col)
        found = bands(spans, kind.rows, kind.cols, unit, batches.MOST, level=kind.stochastic)
        self.stacks = [(band, self._stack(band)) for band in found]

    def pieces(self) -> list[Piece]:
        return pieces_of(self.items, self.buffers)

    def tell(self, told: Views) -> None:
        kind, stacks = self.kind, told[self.kind]
        for band, flat in self.stacks:
            x, together = self._matrices(band, flat), self._together(band.which)
            measured = batches.measure(x, kind.row, kind.col, together=together)
            for grid, stack, stat in zip(kind.stats, stacks, measured, strict=False):
                laid = grid.lay(stat).abs()  # a NaN may have a sign, which would make it the least
                copy(grid.cut(stack.view(torch.float32), band), laid.unbind())
        if kind.reach:
            self._tell_ends(stacks[-1])

    def encode(self, told: Views) -> None:
        kind, stacks = self.kind, told[self.kind]
        reduced = [t.view(torch.float32) for t in stacks[: len(kind.stats)]]
        measured = [grid.lift(stack) for grid, stack in zip(kind.stats, reduced, strict=True)]
        used = [m if k is None else k for m, k in zip(measured, self._known(), strict=True)]
        self._follow(used)
        for band, flat in self.stacks:
            if kind.reach:
                self._fill(band, flat, stacks[-1])
            self._encode(band, flat, used)
        self.stacks = []
        self._remember(measured)

    def finish(self, chosen: Sequence[int]) -> None:
        super().finish(chosen)
        for part in self._batches(chosen):
            for direction, j, grid, buffers in self.buffers:
                if direction == "col":
                    stack = torch.stack([buffers[i] for i in part])
                    write(self._held("col", part), [(j, grid.lift(grid.spread(stack)))])

    def _follow(self, stats: Sequence[Tensor]) -> None:
        """Write the buffers that follow from the statistics alone, of the whole weights."""
        kind, at = self.kind, 0
        for direction, side in kind.sides:
            own, at = stats[at : at + len(side.stats)], at + len(side.stats)
            coded = kind.coded(direction, side)
            wanted = [j for j in range(len(side.layout)) if j not in coded]
            shape = (kind.rows, kind.cols) if direction == "row" else (kind.cols, kind.rows)
            for part in self._batches(range(len(self.items)) if wanted else ()):
                taken = [stat[part[0] : part[-1] + 1] for stat in own]
                made = batches.follow(side, taken, shape, len(part), wanted, self.device, together=kind.together)
                write(self._encoded(direction, part), zip(wanted, made, strict=True))

    def _encode(self, band: Band, flat: Tensor, stats: Sequence[Tensor]) -> None:
        """Write the codes of the fragments in a band."""
        kind = self.kind
        cut = [
            grid.lift(torch.stack(grid.cut(grid.lay(stat), band))) for grid, stat in zip(kind.stats, stats, strict=True)
        ]
        made = batches.encode(
            self._matrices(band, flat), cut, kind.row, kind.col, self._seeds(band.which), band.tops[0],
            together=self._together(band.which),
        )  # fmt: skip
        operands: dict[Direction, list[Tensor]] = {}
        for direction, side in kind.sides:
            count = len(side.layout)
            operands[direction], made = made[:count], made[count:]
        for direction, j, grid, buffers in self.buffers:
            codes = grid.lay(operands[direction][j]).flatten(1)
            targets: list[Tensor] = []
            sources: list[Tensor] = []
            for n, (i, top) in enumerate(zip(band.which, band.tops, strict=True)):
                start, stop = grid.holding(self.items[i].span[0]), grid.before(self.items[i].span[1])
                above = grid.holding(top * kind.cols)
                targets.append(buffers[i][start:stop])
                sources.append(codes[n, start - above : stop - above])
            copy(targets, sources)

    # ------------------------------------------------------------------------------ the elements

    def _stack(self, band: Band) -> Tensor:
        """The rows that a band covers, one matrix after the other, with zeros for what other ranks own; and one element
        more."""
        cols, size = self.kind.cols, band.height * self.kind.cols
        flat = torch.zeros(len(band.which) * size + 1, dtype=torch.float32, device=self.device)
        targets: list[Tensor] = []
        for n, (i, top) in enumerate(zip(band.which, band.tops, strict=True)):
            start, stop = (n * size + place - top * cols for place in self.items[i].span)
            targets.append(flat[start:stop])
        copy(targets, [self.items[i].values for i in band.which])
        return flat

    def _matrices(self, band: Band, flat: Tensor) -> Tensor:
        return flat[:-1].view(len(band.which), band.height, self.kind.cols)

    def _tell_ends(self, ends: Tensor) -> None:
        """Write the first and the last elements of this rank's fragments, as many as may share a code with others."""
        cols, reach = self.kind.cols, self.kind.reach
        ends.fill_(NOTHING)
        heads = [[*divmod(start, cols), *divmod(stop, cols)] for start, stop in (item.span for item in self.items)]
        ends[:, self.rank, :HEAD] = on_device(heads, torch.int32, self.device)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for item, said in zip(self.items, ends[:, self.rank].unbind(), strict=True):
            count, bits = min(reach, len(item.values)), as_bits(item.values)
            if count:
                targets += [said[HEAD : HEAD + count], said[-count:]]
                sources += [bits[:count], bits[-count:]]
        copy(targets, sources)

    def _fill(self, band: Band, flat: Tensor, ends: Tensor) -> None:
        """Put in the elements of other ranks that these sent."""
        cols, reach, size = self.kind.cols, self.kind.reach, band.height * self.kind.cols
        said = torch.stack([ends[i] for i in band.which])
        place = said[..., :HEAD].long()
        start, stop = place[..., 0] * cols + place[..., 1], place[..., 2] * cols + place[..., 3]
        first_and_last = torch.stack((start, stop - reach), -1)[..., None]
        at = first_and_last + torch.arange(reach, device=self.device)
        owned = (at >= start[..., None, None]) & (at < stop[..., None, None])
        tops = on_device([top * cols for top in band.tops], torch.int64, self.device)
        inside = at - tops.view(-1, 1, 1, 1)
        offset = torch.arange(len(band.which), device=self.device).view(-1, 1, 1, 1) * size
        spare = len(flat) - 1
        to = torch.where(owned & (inside >= 0) & (inside < size), inside + offset, spare)
        flat.scatter_(0, to.flatten(), said[..., HEAD:].flatten().view(torch.float32))


def coded_buffers(kind: Kind, items: Sequence[Item], rows: Sequence[Storage]) -> list[Coded]:
    """The buffers that fragments are encoded to; ``rows`` are the row operands."""
    found: list[Coded] = []
    for direction, side in kind.sides:
        for j, grid in kind.coded(direction, side).items():
            if direction == "row":
                flat = [row.tensors()[j].view(-1) for row in rows]
            else:  # in the order of the weight, and not in that of the operand
                buffer = held("col", items[:1])[0].tensors()[j]
                flat = list(torch.empty(len(items), grid.count, dtype=buffer.dtype, device=buffer.device).unbind())
            found.append((direction, j, grid, flat))
    return found


def pieces_of(items: Sequence[Item], coded: Sequence[Coded]) -> list[Piece]:
    """The pieces that have to be gathered."""
    found: list[Piece] = []
    for direction, _, grid, buffers in coded:
        name = f"{direction}.{grid.covering.name}"
        for item, buffer in zip(items, buffers, strict=True):
            start, stop = item.span
            found.append(Piece(item.index, name, buffer, grid.before(start), grid.before(stop), grid))
    return found
