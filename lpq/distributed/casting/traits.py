"""Traits of a format on which the cast of fragments depends. No format declares them: they are tried out, once.

A small matrix is encoded in several ways. Where the results differ, casts go a dearer way that is right for any format:
they put whole weights together, or take one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lpq import registry
from lpq.distributed.casting import batches
from lpq.distributed.casting.fragments import Grid, reach
from lpq.formats import Quantizer
from lpq.operations.transposing import transpose_reference


@dataclass(frozen=True)
class Traits:
    """How an operand of some quantizer can be cast."""

    coded: tuple[int, ...]
    """The buffers that depend on the elements themselves; the others follow from the statistics."""
    in_parts: bool
    """A fragment, with zeros for the elements that it lacks, is encoded to the codes of the whole, and the MAX of the
    statistics of all fragments is that of the whole. Not so where elements are mixed, as by a rotation."""
    together: bool
    """``torch.vmap`` over a stack gives the bytes that one matrix after the other gives."""


def traits(side: Quantizer) -> Traits:
    """How an operand of this quantizer can be cast."""
    return _traits(side.text)


@registry.cached
def _traits(text: str) -> Traits:
    side = cast("Quantizer", registry.quantizer(text))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        trial = _Trial(side)
        return Traits(trial.coded, trial.works_in_parts(), trial.works_together())


class _Trial:
    """Two matrices of a few blocks, the last of them ragged, and the bytes to which they are encoded one by one."""

    def __init__(self, side: Quantizer) -> None:
        units = [(b.unit(0), b.unit(1)) for b in side.layout] + [s.block for s in side.stats]
        rows, cols = (2 * max(unit[dim] or 1 for unit in units) + 3 for dim in (0, 1))
        self.side = side
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(2, rows, cols, generator=generator, dtype=torch.float32, device="cpu")
        self.stats = batches.measure(self.x, side, None, together=False)
        self.buffers = self.encode(self.x)
        others = self.encode(self.x.flip(0)), self.encode(torch.zeros_like(self.x))
        self.coded = tuple(j for j, made in enumerate(zip(self.buffers, *others, strict=True)) if not _same(*made))

    def encode(self, x: Tensor, *, together: bool = False) -> list[Tensor]:
        """Encode two matrices with the statistics of the two of the trial, and one seed for both."""
        seeds = torch.tensor([5, 5], device="cpu") if self.side.stochastic else None
        return batches.encode(x, self.stats, self.side, None, seeds, together=together)

    def works_in_parts(self) -> bool:
        if self.side.uncut:
            return False
        _, rows, cols = self.x.shape
        cut = (rows // 2) * cols + cols // 2
        before = torch.arange(rows * cols, device="cpu").view(rows, cols) < cut
        head, tail = (torch.where(mask, self.x, 0.0) for mask in (before, ~before))
        measured = [batches.measure(part, self.side, None, together=False) for part in (head, tail)]
        combined = [torch.maximum(a, b) for a, b in zip(*measured, strict=True)]
        if not _all_same(combined, self.stats):
            return False
        grids = {j: Grid(self.side.layout[j], "row", rows, cols) for j in self.coded}
        first, second = self.encode(head), self.encode(tail)
        for j, grid in grids.items():
            whole, upto, on = self.buffers[j], grid.before(max(0, cut - reach(grids.values()))), grid.before(cut)
            if not _same(*(made.reshape(2, -1)[:, :upto] for made in (whole, first[j]))):
                return False
            if not _same(*(made.reshape(2, -1)[:, on:] for made in (whole, second[j]))):
                return False
        return True

    def works_together(self) -> bool:
        try:
            return _all_same(self._everything(together=True), self._everything(together=False))
        except Exception:  # whatever torch.vmap cannot do with this format is done for one after the other
            return False

    def _everything(self, *, together: bool) -> list[Tensor]:
        """The results of every operation that a cast runs over many matrices at once."""
        side, (count, rows, cols) = self.side, self.x.shape
        followed = [j for j in range(len(self.buffers)) if j not in self.coded]
        made = batches.measure(self.x, side, None, together=together) + self.encode(self.x, together=together)
        made += batches.follow(side, self.stats, (rows, cols), count, followed, self.x.device, together=together)
        made += batches.over(self._decode, *self.buffers, together=together)
        if side.state:
            states = {name: torch.stack([t, t + 1]) for name, t in side.new_state().items()}
            made += batches.remember(side, states, self.stats, row=True, col=False, together=together)
        return made

    def _decode(self, *buffers: Tensor) -> list[Tensor]:
        _, rows, cols = self.x.shape
        operand = self.side.storage.wrap(buffers, self.side, (rows, cols), self.x.dtype)
        turned = transpose_reference(operand).tensors() if self.side.transposable else []
        return [operand.decode(), *turned]


def _all_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(_same(one, other) for one, other in zip(a, b, strict=True))


def _same(*tensors: Tensor) -> bool:
    """Whether all hold the same bytes."""
    first, *rest = (t.contiguous().reshape(-1).view(torch.uint8) for t in tensors)
    return all(torch.equal(first, other) for other in rest)
