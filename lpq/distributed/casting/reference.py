"""The cast of the weights of one kind by the code of their format: each rank encodes whole weights. Where the format
declares which buffers follow from statistics, the ranks exchange the statistics of their fragments and the few elements
that share a code with one of another fragment, and zeros stand for all others. Then each rank has all scales, and the
codes of its own elements. For any other format they exchange all elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lpq.distributed.casting import stacks
from lpq.distributed.casting.casts import NOTHING, Cast, Part, Views, copy, remember
from lpq.distributed.casting.kinds import HEAD, Item, Kind
from lpq.formats.format import Direction
from lpq.kernels.host_to_device import on_device

MOST = 1 << 26
"""Elements that one batch may hold, unless a single matrix has more: this bounds the memory that a cast takes."""


class Reference(Cast):
    """The cast of the weights of one kind by the code of their format."""

    def __init__(self, kind: Kind, items: Sequence[Item], rank: int, ranks: int) -> None:
        self.kind, self.part = kind, Part(kind, items, ranks)
        super().__init__([self.part], rank)

    def write_words(self, words: Views) -> None:
        kind, own = self.kind, words[self.kind]
        if self.part.in_parts:
            for batch in self._batches([i for i, item in enumerate(self.items) if len(item.values)]):
                measured = stacks.measure(self._run(batch), kind, self._matrices(self._own(batch)))
                for grid, stack, stat in zip(kind.stats, own, measured, strict=False):
                    laid = grid.lay(stat).abs()  # a NaN may have a sign, which would make it the least
                    copy([stack[i].view(torch.float32) for i in batch], laid.unbind())
            if kind.reach:
                self._write_ends(own[-1])
        elif self.part.exchanged:
            owned = zip(own[-1].fill_(NOTHING).unbind(), self.items, strict=True)
            copy([e[slice(*i.span)] for e, i in owned], [i.values.view(torch.int32) for i in self.items])

    def encode(self, words: Views) -> None:
        measured = [self._encode(batch, words[self.kind]) for batch in self._batches(range(len(self.items)))]
        remember(self.kind, self.items, [torch.cat(same) for same in zip(*measured, strict=True)])

    def finish(self, chosen: Sequence[int]) -> None:
        kind, rows = self.kind, self.part.operands["row"]
        for batch in self._batches(chosen):
            if kind.derives:
                row = [torch.stack(same) for same in zip(*(rows[i].tensors() for i in batch), strict=True)]
                made = stacks.derive_col(self._run(batch), kind, row, self._seeds(batch))
                self._write("col", batch, dict(enumerate(made)))
            if self.part.in_parts:
                gathered = [(j, grid, flat) for direction, j, grid, flat in self.part.coded if direction == "col"]
                stack = {j: grid.lift(grid.spread(torch.stack([flat[i] for i in batch]))) for j, grid, flat in gathered}
                self._write("col", batch, stack)
        self.part.write_strided(chosen)

    def _batches(self, which: Sequence[int]) -> Iterator[Sequence[int]]:
        """These weights in batches of as many as fit."""
        count = max(1, MOST // self.part.size)
        return (which[at : at + count] for at in range(0, len(which), count))

    def _run(self, batch: Sequence[int]) -> stacks.Run:
        return stacks.run_of(self.kind, len(batch))

    def _seeds(self, batch: Sequence[int]) -> Tensor | None:
        seeds = [self.items[i].seed for i in batch]
        return torch.stack([s for s in seeds if s is not None]) if self.kind.stochastic else None

    def _write(self, direction: Direction, batch: Sequence[int], made: dict[int, Tensor]) -> None:
        """Write stacks of buffers, by their place in the layout."""
        operands = self.part.operands[direction]
        for j, stack in made.items():
            copy([operands[i].tensors()[j] for i in batch], stack.unbind())

    # ------------------------------------------------------------------------------ encoding

    def _encode(self, batch: Sequence[int], words: Sequence[Tensor]) -> list[Tensor]:
        """Encode these weights, and return the statistics of the whole of each."""
        kind, taken = self.kind, slice(batch[0], batch[-1] + 1)
        if self.part.in_parts:
            flat = self._own(batch)
            if kind.reach:
                self._fill(flat, words[-1][taken])
            x, reduced = self._matrices(flat), [stack[taken].view(torch.float32) for stack in words]
            stats = [grid.lift(stack) for grid, stack in zip(kind.stats, reduced, strict=False)]
        else:
            own = self.items[taken]
            exchanged = self.part.exchanged
            elements = words[-1][taken].view(torch.float32) if exchanged else torch.stack([item.values for item in own])
            x = elements.view(-1, kind.rows, kind.cols)
            stats = stacks.measure(self._run(batch), kind, x)
        known = zip(*(self.part.known[i] for i in batch), strict=True)
        used = [s if k[0] is None else torch.stack(k) for s, k in zip(stats, known, strict=True)]
        made = stacks.encode(self._run(batch), kind, x, used, self._seeds(batch))
        for direction, side in kind.sides:
            buffers, made = dict(enumerate(made[: len(side.layout)])), made[len(side.layout) :]
            if direction == "col" and self.part.in_parts:
                for _, j, grid, flats in (coded for coded in self.part.coded if coded[0] == "col"):
                    copy([flats[i] for i in batch], grid.lay(buffers.pop(j)).flatten(1).unbind())
            self._write(direction, batch, buffers)
        return stats

    # ------------------------------------------------------------------------------ the elements

    def _own(self, batch: Sequence[int]) -> Tensor:
        """The elements of these weights that this rank owns, with zeros for the others; and one element more."""
        flat = torch.zeros(len(batch) * self.part.size + 1, dtype=torch.float32, device=self.device)
        rows = flat[:-1].view(len(batch), -1).unbind()
        copy(
            [row[slice(*self.items[i].span)] for row, i in zip(rows, batch, strict=True)],
            [self.items[i].values for i in batch],
        )
        return flat

    def _matrices(self, flat: Tensor) -> Tensor:
        return flat[:-1].view(-1, self.kind.rows, self.kind.cols)

    def _write_ends(self, ends: Tensor) -> None:
        """Write the first and the last elements of this rank's fragments, as many as may share a code with others."""
        cols, reach = self.kind.cols, self.kind.reach
        ends.fill_(NOTHING)
        heads = [[*divmod(start, cols), *divmod(stop, cols)] for start, stop in (item.span for item in self.items)]
        ends[:, self.rank, :HEAD] = on_device(heads, torch.int32, self.device)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for item, sent in zip(self.items, ends[:, self.rank].unbind(), strict=True):
            count, bits = min(reach, len(item.values)), item.values.view(torch.int32)
            if count:
                targets += [sent[HEAD : HEAD + count], sent[-count:]]
                sources += [bits[:count], bits[-count:]]
        copy(targets, sources)

    def _fill(self, flat: Tensor, ends: Tensor) -> None:
        """Put in the elements of other ranks that these sent."""
        place = ends[..., :HEAD].long()
        start, stop = (place[..., i] * self.kind.cols + place[..., i + 1] for i in (0, 2))
        first_and_last = torch.stack((start, stop - self.kind.reach), -1)[..., None]
        at = first_and_last + torch.arange(self.kind.reach, device=self.device)
        owned = (at >= start[..., None, None]) & (at < stop[..., None, None])
        offset = torch.arange(len(ends), device=self.device).view(-1, 1, 1, 1) * self.part.size
        to = torch.where(owned, at + offset, len(flat) - 1)
        flat.scatter_(0, to.flatten(), ends[..., HEAD:].flatten().view(torch.float32))
