"""Measure: from a matrix to the statistics that its operands need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from lpq.formats.blocks import traced_amax
from lpq.formats.format import Quantizer
from lpq.operations.format_calls import measured_again_by, measured_by
from lpq.operations.operators import can_call_directly, define, layout_hash, unaliased
from lpq.operations.sides import declared, measured, measures_again, quantizer_of, serving, text_of
from lpq.torch_private.compiling import is_exporting, surely


def measure(
    x: Tensor, row: Quantizer | None, col: Quantizer | None, *, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Measure the local statistics of the matrix ``x`` that its operands need, in the order of ``declared``. If a
    ``dtype`` is given, ``x`` is rounded to it first."""
    if can_call_directly(x):
        return _measured(x, row, col, dtype or x.dtype)
    x = x if dtype is None else x.to(dtype)
    texts = text_of(row), text_of(col)
    return cast("list[Tensor]", torch.ops.lpq.measure(x, *texts, layout_hash(*texts)))


def measure_again(x: Tensor, row: Quantizer | None, col: Quantizer | None, stats: Sequence[Tensor]) -> list[Tensor]:
    """Measure the statistics of round 2 with the reduced ones of round 1; return all, in the order of ``declared``. The
    format's own code runs, also where a compiler or a mode watches."""
    out: list[Tensor] = []
    for side, dim in measured(row, col):
        own = stats[len(out) : len(out) + len(side.stats)]
        if x.numel() and measures_again(side, None):
            first = {s.name: t for s, t in zip(side.stats, own, strict=True) if s.round == 1}
            own = measured_again_by(side, x.t() if dim else x, first)
        out += own
    return out


def measure_reference(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    """Return the statistics of a matrix for its operands, in the order of ``declared``.

    Args:
        x: The matrix.
        row: The quantizer of the row operand; None: it is not wanted.
        col: The quantizer of the column operand; None: it is not wanted.
    """
    out: list[Tensor] = []
    for side, dim in measured(row, col):
        own = x.t() if dim else x
        if x.numel() == 0:
            out += [s.zeros(own.shape[0], own.shape[1], x.device) for s in side.stats]
        elif side.stats:
            out += measured_by(side, own)
    return out


def traced_stats(
    x: Tensor, row: Quantizer | None, col: Quantizer | None, compiled: bool = False
) -> list[Tensor | None]:
    """The amaxes of a whole matrix, as operators of PyTorch, which a compiler puts into the pass that makes the matrix.
    They are in the order of ``declared``, None for a statistic that is measured otherwise; empty where there are no
    amaxes, or no compiler traces."""
    traces = compiled or torch.compiler.is_dynamo_compiling()
    if not traces or is_exporting() or x.dim() != 2 or not surely(x.numel() > 0):
        return []
    needed = [stat.largest and stat.block == (None, None) for stat, _ in declared(row, col)]
    if True not in needed:
        return []
    amax = traced_amax(x)
    return [] if amax is None else [amax if whole else None for whole in needed]


def _measured(x: Tensor, row: Quantizer | None, col: Quantizer | None, dtype: torch.dtype) -> list[Tensor]:
    choice = serving("measure", row, col, x.device)
    if choice is None:
        return unaliased(_measured(x, row, None, dtype) + _measured(x, None, col, dtype), ())
    if choice.impl is None:
        return unaliased(measure_reference(x.to(dtype), row, col), ())
    impl = choice.impl if x.dtype is dtype else choice.rounding(dtype)
    stats: list[Tensor] = impl(x, row, col)
    return stats


def bind_measure(
    row: Quantizer | None, col: Quantizer | None, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], list[Tensor]]:
    """Choose now what measures matrices of this dtype for these operands."""
    choice = serving("measure", row, col, device)
    if choice is None or choice.impl is None:
        return partial(_measured, row=row, col=col, dtype=dtype)
    return partial(choice.impl, row=row, col=col)


def _measure(x: Tensor, row: str, col: str, layouts: str = "") -> list[Tensor]:
    return _measured(x, quantizer_of(row), quantizer_of(col), x.dtype)


def empty_stats(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    rows, cols = x.shape
    return [
        x.new_empty(stat.grid(rows, cols) if dim == 0 else stat.grid(cols, rows), dtype=stat.dtype)
        for stat, dim in declared(row, col)
    ]


define(
    'measure(Tensor x, str row, str col, str layouts="") -> Tensor[]',
    _measure,
    lambda x, row, col, layouts="": empty_stats(x, quantizer_of(row), quantizer_of(col)),
)
