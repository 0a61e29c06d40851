"""The decisions on how a weight is encoded for its gathers, each made once: a gather then only launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.distributed.several_matrices import Scratch, SentOperand, ShardOperands, bind_operands, encodes_several
from lpq.distributed.shardability import operand_bytes, why_in, why_whole
from lpq.formats import Quantizer
from lpq.formats.layout import Stat
from lpq.formats.sections import is_stack
from lpq.kernels.table import bound_once
from lpq.operations.binding import Encoding, Run, on_device
from lpq.operations.bound import bind_run
from lpq.operations.derived_operands import derives_col, made_at_use
from lpq.operations.operators import can_bypass_dispatcher
from lpq.operations.quantizing import quantized
from lpq.operations.reduce_statistics import spans
from lpq.operations.sides import declared
from lpq.operations.states import moves, recalls, state_names

Buffers = Sequence[Tensor]
"""The buffers of an operand, in the order of its layout; none of one that is not encoded."""


class Sides(NamedTuple):
    """The operands that are encoded from shards of a weight, and the statistics that they need."""

    quantizer: Quantizer
    row: Quantizer
    col: Quantizer | None
    """None: the column operand follows from the row operand."""
    stats: list[tuple[Stat, int]]
    """The statistics, in the order of ``declared``."""
    spans: tuple[bool, ...]
    """For each statistic, whether it spans the shards of a matrix."""
    stack: bool
    remembers: bool
    """Whether the layer has a state of the weight, which holds some of the statistics."""
    measured: bool
    """Whether shards are measured before they are gathered: for a statistic that spans them, or for the state."""


@cache
def sides_of(quantizer: Quantizer, stack: bool) -> Sides:
    """The operands that are encoded from shards, or from some matrices of a stack."""
    row, col = quantizer.side("row"), None if derives_col(quantizer) else quantizer.side("col")
    stats = declared(row, col)
    is_recalled = recalls(quantizer, row, col)
    across = tuple(map(spans, stats))
    needs_ranks = not stack and any(a and not k for a, k in zip(across, is_recalled, strict=True))
    measures = needs_ranks or moves(quantizer, row, col)
    return Sides(quantizer, row, col, stats, across, stack, bool(state_names(quantizer)), measures)


class GatherPlan(NamedTuple):
    """How a weight is gathered in one direction, or in both."""

    row: bool
    """Whether the row operand is wanted; ``col`` likewise."""
    col: bool
    sends_row: bool
    """Whether the row operand is encoded and sent: it is wanted, or the column operand follows from it."""
    sends_col: bool
    high: bool
    """Whether the weight travels in high precision, as its operands have more bytes, or as one cannot be encoded shard
    by shard."""


def plan_of(
    sides: Sides, directions: tuple[bool, bool], shape: tuple[int, ...], dtype: torch.dtype, ranks: int, stored: bool
) -> GatherPlan:
    """Decide how a weight is gathered. ``shape``, ``dtype``: of the whole weight; ``stored``: shards are encoded."""
    row, col = directions
    if made_at_use(sides.quantizer):
        row, col = row or col, False
    rows, cols = shape[-2:]
    size = operand_bytes(sides.quantizer, rows, cols, dtype, row, col)
    whole = why_whole(sides.quantizer, shape[0], ranks, sides.stack)
    high = not stored and ranks > 1 and (size > rows * cols * dtype.itemsize or why_in(whole, directions) is not None)
    return GatherPlan(row, col, row or sides.col is None, col and sides.col is not None, high)


class Task(NamedTuple):
    """A matrix, or matrices of a stack, that is encoded in each gather."""

    sides: Sides
    plan: GatherPlan
    shape: tuple[int, ...]
    x_dtype: torch.dtype
    """The dtype of the tensor."""
    dtype: torch.dtype
    """The dtype that it is first rounded to."""
    device: torch.device
    has_stats: tuple[bool, ...]
    """For each statistic of ``sides``, whether it is known before the encoding."""


Key = tuple[SentOperand, tuple[tuple[int, int], ...], torch.dtype, torch.device, Scratch | None]
Encoders = dict[Key, ShardOperands]
"""The encoders of several matrices, by the properties that determine an encoder."""
_run_of = bound_once(bind_run)
"""``bind_run`` for all weights of a model that are encoded alike."""


class ShardsEncoder:
    """The encodings of several matrices, all on one device, each bound once.

    Where there are kernels for it, all matrices of one quantizer take one launch for each operand, and the returned
    buffers are valid until the next call. Every other matrix has launches of its own."""

    def __init__(self, tasks: Sequence[Task], encoders: Encoders | None = None, scratch: Scratch | None = None) -> None:
        """``encoders``: the encoders of several matrices, which encoders of equal tasks share. None: each matrix has
        launches of its own. ``scratch``: memory for operands of which each gather sends others than the last."""
        self._tasks, self._device = tasks, tasks[0].device if tasks else torch.device("cpu")
        self._together = [] if encoders is None else _together(tasks, encoders, scratch)
        together = {n for numbers, _ in self._together for n in numbers}
        self._apart = [(n, _bind(task), _of_sides(task)) for n, task in enumerate(tasks) if n not in together]
        alike = all(len(numbers) == len(tasks) for numbers, _ in self._together)
        self.all = [operands for _, operands in self._together] if alike else []
        """The encoders of the wanted operands of all matrices, if one launch each encodes them; empty otherwise."""

    def __call__(self, xs: Sequence[Tensor], stats: Sequence[Sequence[Tensor | None]]) -> list[tuple[Buffers, Buffers]]:
        """The row operand and the column operand of each tensor, with the statistics of each in the order of
        ``Sides.stats``."""
        tasks = self._tasks
        if not xs or not can_bypass_dispatcher(xs[0]):
            triples = zip(tasks, xs, stats, strict=True)
            return [_dispatched(task, x, own_stats[_of_sides(task)]) for task, x, own_stats in triples]
        results: list[tuple[Buffers, Buffers]] = [((), ())] * len(tasks)
        with on_device(self._device):
            for numbers, operands in self._together:
                encoded = operands.encode([xs[n] for n in numbers], [stats[n] for n in numbers])
                for n, buffers in zip(numbers, encoded.buffers, strict=True):
                    results[n] = (buffers, results[n][1]) if operands.direction == "row" else (results[n][0], buffers)
            for n, run, of_them in self._apart:
                if run is not None:
                    results[n] = run(xs[n], stats[n][of_them], None)[:2]
                else:
                    results[n] = _dispatched(tasks[n], xs[n], stats[n][of_them])
        return results


def _together(
    tasks: Sequence[Task], encoders: Encoders, scratch: Scratch | None
) -> list[tuple[list[int], ShardOperands]]:
    """The numbers of the matrices that are encoded together, and their encoders."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for n, task in enumerate(tasks):
        operands = _operands_of(task)
        if is_stack(task.shape) or task.x_dtype is not torch.float32 or not operands:
            continue
        if all(encodes_several(operand, task.device) for operand in operands):
            alike.setdefault((*operands, task.dtype), []).append(n)
    once = len(alike) == 1 and not any(task.sides.col is None or len(_operands_of(task)) > 1 for task in tasks)
    groups: list[tuple[list[int], ShardOperands]] = []
    for numbers in alike.values():
        task = tasks[numbers[0]]
        shapes = tuple((tasks[n].shape[0], tasks[n].shape[1]) for n in numbers)
        fills: list[ShardOperands] = []
        for operand in _operands_of(task):
            key = operand, shapes, task.dtype, task.device, scratch if once else None
            if (fill := encoders.get(key) or (bind_operands(*key) if len(numbers) > 1 else None)) is not None:
                encoders[key] = fill
                fills.append(fill)
        if len(fills) == len(_operands_of(task)):
            groups += [(numbers, fill) for fill in fills]
    return groups


def _operands_of(task: Task) -> list[SentOperand]:
    """The operands that are encoded."""
    row, col = _sides(task)
    count = len(task.sides.row.stats)
    operands = [SentOperand(row, "row", 0, task.has_stats[:count])] if row is not None else []
    return operands if col is None else [*operands, SentOperand(col, "col", count, task.has_stats[count:])]


def _sides(task: Task) -> tuple[Quantizer | None, Quantizer | None]:
    return task.sides.row if task.plan.sends_row else None, task.sides.col if task.plan.sends_col else None


def _of_sides(task: Task) -> slice:
    """Select, of the statistics of ``Sides``, those that the encoded operands need."""
    count = len(task.sides.row.stats)
    return slice(0 if task.plan.sends_row else count, len(task.sides.stats) if task.plan.sends_col else count)


def _bind(task: Task) -> Run | None:
    """The bound encoder of a matrix; None for a stack."""
    if is_stack(task.shape):
        return None
    flags = task.has_stats[_of_sides(task)]
    rows, cols = task.shape
    e = Encoding(*_sides(task), (rows, cols), task.x_dtype, task.dtype, task.device, flags if True in flags else ())
    with on_device(task.device):
        run: Run = _run_of(e)
    return run


def _dispatched(task: Task, x: Tensor, stats: Sequence[Tensor | None]) -> tuple[Buffers, Buffers]:
    """As the bound encoders, by operators."""
    return quantized(x, stats, *_sides(task), dtype=task.dtype)[:2]
