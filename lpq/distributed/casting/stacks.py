"""Matrices of one kind, measured, encoded and transposed all at once, by as many launches as one of them takes.

``torch.vmap`` runs the code of a format for one matrix over a whole stack of them. A format that cannot be run like
that gets one matrix after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from lpq import operations, registry
from lpq.distributed.casting.kinds import Kind
from lpq.formats import Quantizer
from lpq.formats.layout import as_bytes
from lpq.operations import remember as remember_one
from lpq.operations.vmapped import Function, vmapped


def over(kind: Kind, function: Function, *stacks: Tensor, together: bool | None) -> list[Tensor]:
    """Call ``function`` on each matrix of the stacks, and return a stack of each of its results. ``together``: whether
    by ``torch.vmap``; None: if that is right."""
    if run_together(kind, len(stacks[0])) if together is None else together:
        return vmapped(function, *stacks)
    results = [function(*each) for each in zip(*(stack.unbind() for stack in stacks), strict=True)]
    return [torch.stack(list(same)) for same in zip(*results, strict=True)]


def measure(kind: Kind, x: Tensor, *, together: bool | None = None) -> list[Tensor]:
    """The statistics of each matrix, in the order of the kind's."""
    if not kind.stats:
        return []
    return over(kind, lambda each: operations.measure_reference(each, kind.row, kind.col), x, together=together)


def encode(
    kind: Kind, x: Tensor, stats: Sequence[Tensor], seeds: Tensor | None, *, together: bool | None = None
) -> list[Tensor]:
    """The buffers of the operands of each matrix, the row operand's first."""

    def one(each: Tensor, *rest: Tensor) -> list[Tensor]:
        known, seed = rest[: len(stats)], None if seeds is None else rest[-1]
        return operations.quantize_as_written(each, known, kind.row, kind.col, seed, 0, False)

    return over(kind, one, x, *stats, *([] if seeds is None else [seeds]), together=together)


def derive_col(
    kind: Kind, row: Sequence[Tensor], seeds: Tensor | None, *, together: bool | None = None
) -> list[Tensor]:
    """The buffers of column operands from those of row operands, as ``lpq.operations.derived_operands`` makes one."""
    side, col = kind.quantizer.side("row"), kind.quantizer.side("col")

    def one(*tensors: Tensor) -> list[Tensor]:
        operand = side.storage.wrap(tensors[: len(row)], side, (kind.rows, kind.cols), kind.dtype)
        if kind.quantizer.col_source == "original":
            return operations.transpose_reference(operand).tensors()
        x, seed = operations.decode_reference(operand, torch.float32), None if seeds is None else tensors[-1]
        return operations.quantize_as_written(x, [], None, col, seed, 0, False)

    return over(kind, one, *row, *([] if seeds is None else [seeds]), together=together)


def remember(
    kind: Kind, states: Mapping[str, Tensor], measured: Sequence[Tensor], *, together: bool | None = None
) -> list[Tensor]:
    """The state of each weight after a step with these statistics, in the order of ``states``."""

    def one(*tensors: Tensor) -> list[Tensor]:
        state = dict(zip(states, tensors, strict=False))
        row, col = kind.row is not None, kind.col is not None
        remember_one(kind.quantizer, state, list(tensors[len(states) :]), row=row, col=col)
        return list(state.values())

    return over(kind, one, *states.values(), *measured, together=together)


def run_together(kind: Kind, count: int) -> bool:
    """Whether so many are run by ``torch.vmap``."""
    return count > 1 and _alike(kind.quantizer.text)


@registry.cached
def _alike(text: str) -> bool:
    """Whether ``torch.vmap`` gives the bytes that one matrix after the other gives, by one comparison on a CPU."""
    quantizer = cast("Quantizer", registry.quantizer(text))
    sides = quantizer.side("row"), quantizer.side("col")
    size = 2 * max([1, *(unit for side in sides for dim in (0, 1) for unit in side.units(dim))]) + 3  # a ragged block
    kind = Kind(quantizer, True, True, size, size, torch.float32, bool(quantizer.new_state()))
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        try:
            made, wanted = (_everything(kind, together=together) for together in (True, False))
        except Exception:  # whatever torch.vmap cannot do with this format is done for one after the other
            return False
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(made, wanted, strict=True))


def _everything(kind: Kind, *, together: bool) -> list[Tensor]:
    """The results of all that a cast does with two weights."""
    x = torch.randn(2, kind.rows, kind.cols, generator=torch.Generator().manual_seed(0))
    seeds = torch.tensor([5, 5]) if kind.stochastic else None
    stats = measure(kind, x, together=together)
    out = encode(kind, x, stats, seeds, together=together)
    made = [*stats, *out]
    if kind.derives:
        made += derive_col(kind, out[: len(kind.quantizer.side("row").layout)], seeds, together=together)
    if kind.remembers:
        states = {name: torch.stack([t, t + 1]) for name, t in kind.quantizer.new_state().items()}
        made += remember(kind, states, stats, together=together)
    return made
