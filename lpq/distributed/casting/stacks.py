"""Matrices of one kind, measured, encoded and transposed all at once, by as many launches as one of them takes.

``torch.vmap`` runs the code of a format for one matrix over a whole stack of them. A format that cannot be run like
that gets one matrix after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from lpq import operations, registry
from lpq.distributed.casting.kinds import Kind
from lpq.formats import Quantizer
from lpq.formats.layout import as_bytes
from lpq.operations import remember as remember_one
from lpq.operations.vmapped import Function, vmapped

Run = Callable[..., list[Tensor]]
"""Calls a function on each matrix of stacks, and returns a stack of each of its results."""


def one_by_one(function: Function, *stacks: Tensor) -> list[Tensor]:
    """Call ``function`` on one matrix after the other."""
    results = [function(*each) for each in zip(*(stack.unbind() for stack in stacks), strict=True)]
    return [torch.stack(list(same)) for same in zip(*results, strict=True)]


def run_of(kind: Kind, count: int) -> Run:
    """How so many matrices of this kind are run: by ``torch.vmap``, if that is right."""
    return vmapped if count > 1 and _alike(kind.quantizer.text) else one_by_one


def measure(run: Run, kind: Kind, x: Tensor) -> list[Tensor]:
    """The statistics of each matrix, in the order of the kind's."""
    if not kind.stats:
        return []
    return run(lambda each: operations.measure_reference(each, kind.row, kind.col), x)


def encode(run: Run, kind: Kind, x: Tensor, stats: Sequence[Tensor], seeds: Tensor | None) -> list[Tensor]:
    """The buffers of the operands of each matrix, the row operand's first."""

    def one(each: Tensor, *rest: Tensor) -> list[Tensor]:
        known, seed = rest[: len(stats)], None if seeds is None else rest[-1]
        return operations.quantize_as_written(each, known, kind.row, kind.col, seed, 0, False)

    return run(one, x, *stats, *([] if seeds is None else [seeds]))


def derive_col(run: Run, kind: Kind, row: Sequence[Tensor], seeds: Tensor | None) -> list[Tensor]:
    """The buffers of column operands from those of row operands, as ``lpq.operations.derived_operands`` makes one."""
    side, col = kind.quantizer.side("row"), kind.quantizer.side("col")

    def one(*tensors: Tensor) -> list[Tensor]:
        operand = side.storage.wrap(tensors[: len(row)], side, (kind.rows, kind.cols), kind.dtype)
        if kind.quantizer.col_source == "original":
            return operations.transpose_reference(operand).tensors()
        x, seed = operations.decode_reference(operand, torch.float32), None if seeds is None else tensors[-1]
        return operations.quantize_as_written(x, [], None, col, seed, 0, False)

    return run(one, *row, *([] if seeds is None else [seeds]))


def remember(run: Run, kind: Kind, states: Mapping[str, Tensor], measured: Sequence[Tensor]) -> list[Tensor]:
    """The state of each weight after a step with these statistics, in the order of ``states``."""

    def one(*tensors: Tensor) -> list[Tensor]:
        state = dict(zip(states, tensors, strict=False))
        row, col = kind.row is not None, kind.col is not None
        remember_one(kind.quantizer, state, list(tensors[len(states) :]), row=row, col=col)
        return list(state.values())

    return run(one, *states.values(), *measured)


@registry.cached
def _alike(text: str) -> bool:
    """Whether ``torch.vmap`` gives the bytes that one matrix after the other gives, by one comparison on a CPU."""
    quantizer = cast("Quantizer", registry.quantizer(text))
    sides = quantizer.side("row"), quantizer.side("col")
    size = 2 * max([1, *(unit for side in sides for dim in (0, 1) for unit in side.units(dim))]) + 3  # a ragged block
    kind = Kind(quantizer, True, True, size, size, torch.float32, bool(quantizer.new_state()))
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        try:
            made, wanted = (_everything(run, kind) for run in (vmapped, one_by_one))
        except Exception:  # whatever torch.vmap cannot do with this format is done for one after the other
            return False
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(made, wanted, strict=True))


def _everything(run: Run, kind: Kind) -> list[Tensor]:
    """The results of all that a cast does with two weights."""
    x = torch.randn(2, kind.rows, kind.cols, generator=torch.Generator().manual_seed(0))
    seeds = torch.tensor([5, 5]) if kind.stochastic else None
    stats = measure(run, kind, x)
    out = encode(run, kind, x, stats, seeds)
    made = [*stats, *out]
    if kind.derives:
        made += derive_col(run, kind, out[: len(kind.quantizer.side("row").layout)], seeds)
    if kind.remembers:
        states = {name: torch.stack([t, t + 1]) for name, t in kind.quantizer.new_state().items()}
        made += remember(run, kind, states, stats)
    return made
