"""Matrices of one shape, measured, encoded and transposed all at once, by as many launches as one of them takes.

``torch.vmap`` runs the code of a format for one matrix over a whole stack of them. A format that cannot be run like
that (``lpq.distributed.casting.traits`` tries it) gets one matrix after the other. Weights that kernels of the table
cast do not come here: see ``batched``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lpq import operations
from lpq.formats import Buffer, Quantizer
from lpq.formats.layout import blocks
from lpq.operations import remember as remember_one
from lpq.operations.vmapped import Function, vmapped

MOST = 1 << 26
"""Elements that one batch may hold, unless a single matrix has more: this bounds the memory that a cast takes."""


def over(function: Function, *stacks: Tensor, together: bool) -> list[Tensor]:
    """Call ``function`` on each matrix of the stacks, and return a stack of each of its results."""
    if together:
        return vmapped(function, *stacks)
    results = [function(*each) for each in zip(*(stack.unbind() for stack in stacks), strict=True)]
    return [torch.stack(list(same)) for same in zip(*results, strict=True)]


def measure(x: Tensor, row: Quantizer | None, col: Quantizer | None, *, together: bool) -> list[Tensor]:
    """The statistics of each matrix, in the order of ``operations.declared``."""
    if not operations.declared(row, col):
        return []
    run = operations.measure_reference if together else operations.measure
    return over(lambda each: run(each, row, col), x, together=together)


def encode(
    x: Tensor,
    stats: Sequence[Tensor],
    row: Quantizer | None,
    col: Quantizer | None,
    seeds: Tensor | None = None,
    offset: int = 0,
    *,
    together: bool,
) -> list[Tensor]:
    """The buffers of the operands of each matrix, the row operand's first. ``offset``: their first row in the whole."""

    def one(each: Tensor, *rest: Tensor) -> list[Tensor]:
        known, seed = list(rest[: len(stats)]), None if seeds is None else rest[-1]
        if together:
            return operations.quantize_as_written(each, known, row, col, seed, offset, False)
        first, second, _ = operations.quantize(each, known, row, col, seed, offset)
        return [t for operand in (first, second) if operand is not None for t in operand.tensors()]

    return over(one, x, *stats, *([] if seeds is None else [seeds]), together=together)


def follow(
    side: Quantizer,
    stats: Sequence[Tensor],
    shape: tuple[int, int],
    count: int,
    wanted: Sequence[int],
    device: torch.device,
    *,
    together: bool,
) -> list[Tensor]:
    """The buffers ``wanted`` of operands ``shape``: those that follow from the statistics alone.

    Since elements do not matter, zeros are encoded. Where each block has one statistic of each kind, a single zero
    stands for it, as if it were a matrix of its own.
    """
    layout = side.layout
    steps = _steps(side, wanted)
    single = together and steps is not None
    down, across = (blocks(size, step) for size, step in zip(shape, steps or (None, None), strict=True))
    if single:
        stats = [_spread(stat, (count, down, across)) for stat in stats]
        x = torch.zeros((), dtype=torch.float32, device=device).expand(count * down * across, 1, 1)
    else:
        x = torch.zeros((), dtype=torch.float32, device=device).expand(count, *shape)
    seeds = torch.zeros(len(x), dtype=torch.int64, device=device) if side.stochastic else None
    out = encode(x, stats, side, None, seeds, together=together)
    if not single:
        return [out[j] for j in wanted]
    return [_gathered(layout[j], out[j], (count, down, across), shape) for j in wanted]


def _steps(side: Quantizer, wanted: Sequence[int]) -> tuple[int | None, int | None] | None:
    """The one block of all statistics and buffers that are finer than a dimension; None if there are several."""
    layout = side.layout
    units = [s.block for s in side.stats] + [(layout[j].unit(0), layout[j].unit(1)) for j in wanted]
    down, across = ({unit[dim] for unit in units} - {None} for dim in (0, 1))
    if len(down) > 1 or len(across) > 1:
        return None
    return next(iter(down), None), next(iter(across), None)


def _spread(stat: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """A matrix of statistics as one for each block, also where one value covers many."""
    if stat.dim() == 1:
        return stat.view(-1, 1, 1).expand(grid).reshape(-1)
    return stat.expand(grid).reshape(-1, 1, 1)


def _gathered(buffer: Buffer, of_each: Tensor, grid: tuple[int, int, int], shape: tuple[int, int]) -> Tensor:
    """The buffer of many matrices ``shape`` from that of each of their blocks, also where one value covers many."""
    values = of_each.view(*grid, *(() if buffer.values is None else (buffer.values,)))
    if buffer.block == (None, None):
        return values[:, 0, 0]
    down, across = buffer.lattice(*shape)
    return values[:, :down, :across]


def derive_col(
    quantizer: Quantizer,
    row: Sequence[Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    seeds: Tensor | None,
    *,
    together: bool,
) -> list[Tensor]:
    """The buffers of column operands from those of row operands, as ``lpq.operations.derived_operands`` makes one."""
    side, col = quantizer.side("row"), quantizer.side("col")

    def one(*tensors: Tensor) -> list[Tensor]:
        operand = side.storage.wrap(tensors[: len(row)], side, shape, dtype)
        if quantizer.col_source == "original":
            return (operations.transpose_reference if together else operations.transpose)(operand).tensors()
        x = (operations.decode_reference if together else operations.decode)(operand, torch.float32)
        seed = tensors[-1] if seeds is not None else None
        if together:
            return operations.quantize_as_written(x, [], None, col, seed, 0, False)
        _, derived, _ = operations.quantize(x, None, None, col, seed)
        assert derived is not None
        return derived.tensors()

    return over(one, *row, *([] if seeds is None else [seeds]), together=together)


def remember(
    quantizer: Quantizer,
    states: Mapping[str, Tensor],
    measured: Sequence[Tensor],
    *,
    row: bool,
    col: bool,
    together: bool,
) -> list[Tensor]:
    """The state of each tensor after a step with these statistics, in the order of ``states``."""

    def one(*tensors: Tensor) -> list[Tensor]:
        state = dict(zip(states, tensors, strict=False))
        remember_one(quantizer, state, list(tensors[len(states) :]), row=row, col=col)
        return list(state.values())

    return over(one, *states.values(), *measured, together=together)
