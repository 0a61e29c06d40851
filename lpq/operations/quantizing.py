"""Quantize: from a matrix to its operands, and to the statistics that are measured on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.formats.format import Quantizer, Storage
from lpq.formats.sections import is_stack
from lpq.operations.binding import on_device
from lpq.operations.bound import NEITHER, encoding
from lpq.operations.format_calls import encoded_by
from lpq.operations.measuring import empty_stats, traced_stats
from lpq.operations.operators import can_call_directly, define, layout_hash
from lpq.operations.random_seeds import draw_seeds
from lpq.operations.references import quantize_reference
from lpq.operations.sides import quantizer_of, shared, text_of
from lpq.torch_private.dispatch import autocasts, modes

Quantized = tuple[Sequence[Tensor], Sequence[Tensor], list[Tensor]]
"""The buffers of the row operand and of the column operand, and the statistics."""


def quantize(
    x: Tensor,
    stats: Sequence[Tensor | None] | None,
    row: Quantizer | None,
    col: Quantizer | None,
    seed: Tensor | None = None,
    offset: int = 0,
    *,
    measure: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Storage | None, Storage | None, list[Tensor]]:
    """Encode as ``quantized`` does; return the operands."""
    of_row, of_col, measured = quantized(x, stats, row, col, seed, offset, measure=measure, dtype=dtype)
    *count, rows, cols = x.shape
    dtype = dtype or x.dtype
    return (
        None if row is None else row.storage.from_tensors(of_row, row, (*count, rows, cols), dtype),
        None if col is None else col.storage.from_tensors(of_col, col, (*count, cols, rows), dtype),
        measured,
    )


def quantized(
    x: Tensor,
    stats: Sequence[Tensor | None] | None,
    row: Quantizer | None,
    col: Quantizer | None,
    seed: Tensor | None = None,
    offset: int = 0,
    *,
    measure: bool = False,
    dtype: torch.dtype | None = None,
    across: int = 0,
    at_hand: bool = False,
    compiled: bool = False,
) -> Quantized:
    """Encode the matrix ``x``, rounded to ``dtype`` if one is given, into the wanted operands; return the buffers of
    both and, with ``measure``, the statistics of ``x``. In a stack ``x`` each matrix is encoded by itself: given
    statistics, and seeds, have one value for each along their first dimension, and no statistics are returned.
    ``offset`` and ``across``: the first row and the first column of ``x`` in the whole tensor, by which random bits are
    drawn. Kernels begin at the first column; from any other one the reference draws the random bits. ``at_hand``: no
    graph that is traced makes ``x``, so none of its passes could measure ``x`` without reading it once more: the kernel
    measures it. ``compiled``: a compiler traces it, which is known to Dynamo alone otherwise.

    A statistic that is not given is measured here. Ordinary matrices (``Quantizer.plain``) are made in place of a call:
    an operator may not return a view of its input.
    """
    if (row is not None and row.plain) or (col is not None and col.plain):
        return _with_plain(x if dtype is None else x.to(dtype), stats, row, col, seed, offset, measure, across)
    if seed is None and ((row is not None and row.stochastic) or (col is not None and col.stochastic)):
        seed = draw_seeds(x, x, x.shape[0]) if is_stack(x.shape) else draw_seeds(x, x, 1)[0]
    dtype = dtype or x.dtype
    if can_call_directly(x):
        with on_device(x.device):
            out = quantize_tensors(
                x, stats or (), text_of(row), text_of(col), seed, offset, measure, across=across, dtype=dtype
            )
    else:
        texts, x = (text_of(row), text_of(col)), x.to(dtype)
        traced = [] if stats or at_hand else traced_stats(x, row, col, compiled)
        has_all = measure and len(traced) > 0 and None not in traced
        measures = not has_all and measure
        out = torch.ops.lpq.quantize(x, stats or traced, *texts, seed, offset, measures, layout_hash(*texts), across)
        if has_all:
            out = [*out, *(stat for stat in traced if stat is not None)]
    at = 0 if row is None else len(row.layout)
    end = at if col is None else at + len(col.layout)
    return out[:at], out[at:end], out[end:]


def _with_plain(
    x: Tensor, stats: Sequence[Tensor | None] | None, row: Quantizer | None, col: Quantizer | None,
    seed: Tensor | None, offset: int, measure: bool, across: int,
) -> Quantized:  # fmt: skip
    """Encode where at least one operand is an ordinary matrix, which has no statistics."""
    plain_row, plain_col = (None if side is None or not side.plain else side for side in (row, col))
    row, col = (None if plain_row else row), (None if plain_col else col)
    rest: Quantized = ((), (), [])
    if row is not None or col is not None:
        rest = quantized(x, stats, row, col, seed, offset, measure=measure, across=across)
    of_row, of_col, measured = rest
    if plain_row is not None:
        of_row = [_plain(plain_row, x)]
    if plain_row is not None and shared(plain_row, plain_col):
        of_col = [of_row[0].mT]  # one cast serves both
    elif plain_col is not None:
        of_col = [_plain(plain_col, x).mT]
    return of_row, of_col, measured


def _plain(side: Quantizer, x: Tensor) -> Tensor:
    """Make an ordinary matrix, or a stack of them: elements are independent."""
    (data,) = encoded_by(side, x.flatten(0, 1) if is_stack(x.shape) else x, {}, None).tensors()
    return data.view(x.shape) if is_stack(x.shape) else data


def quantize_tensors(
    x: Tensor, stats: Sequence[Tensor | None], row: str, col: str, seed: Tensor | None, offset: int, measure: bool,
    layouts: str = "", across: int = 0, dtype: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """The operator's body: the buffers of both operands, then the statistics. Compiled code calls it in place of the
    operator. ``dtype``: ``x`` is rounded to it first."""
    if autocasts() and torch.is_autocast_enabled(x.device.type):  # it would round what a reference multiplies
        with torch.autocast(x.device.type, enabled=False):
            return quantize_tensors(x, stats, row, col, seed, offset, measure, layouts, across, dtype)
    dtype = dtype or x.dtype
    if x.dim() != 2:
        return _of_stack(x, stats, row, col, seed, offset, dtype)
    if across:  # kernels draw random bits from the first column on
        x, sides = x.to(dtype), (quantizer_of(row), quantizer_of(col))
        return quantize_reference(x, stats, *sides, seed, offset, measure, across)
    if stats:
        stats = [s if s is None or s.is_contiguous() else s.contiguous() for s in stats]
        flags = tuple([s is not None for s in stats])
    else:
        flags = ()
    run = encoding(row, col, x.shape, x.dtype, dtype, x.device, flags, offset, measure, NEITHER, modes() > 0)
    of_row, of_col, measured = run(x, stats, seed)
    return [*of_row, *of_col, *measured]


def _of_stack(
    x: Tensor, stats: Sequence[Tensor | None], row: str, col: str, seed: Tensor | None, offset: int, dtype: torch.dtype
) -> list[Tensor]:
    """The buffers of a stack are the buffers of its matrices, stacked."""
    seeds = [None] * x.shape[0] if seed is None else seed.unbind()
    of_each = [[None if s is None else s[i] for s in stats] for i in range(x.shape[0])]
    each = [
        quantize_tensors(matrix, own, row, col, s, offset, False, dtype=dtype)
        for matrix, own, s in zip(x, of_each, seeds, strict=True)
    ]
    if not each:
        return _fresh(x, quantizer_of(row), quantizer_of(col))
    return [torch.stack(buffers) for buffers in zip(*each, strict=True)]


def _quantize_fake(
    x: Tensor, stats: Sequence[Tensor | None], row: str, col: str, seed: Tensor | None, offset: int, measure: bool,
    layouts: str = "", across: int = 0,
) -> list[Tensor]:  # fmt: skip
    out = _fresh(x, quantizer_of(row), quantizer_of(col))
    return out + (empty_stats(x, quantizer_of(row), quantizer_of(col)) if measure else [])


def _fresh(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    """Allocate the buffers of these operands of ``x``, uninitialised."""
    *count, rows, cols = x.shape
    out: list[Tensor] = []
    for side, shape in ((row, (*count, rows, cols)), (col, (*count, cols, rows))):
        if side is not None:
            out += side.storage.fresh(side, shape, x).tensors()
    return out


define(
    "quantize(Tensor x, Tensor?[] stats, str row, str col, Tensor? seed, int offset, bool measure, "
    'str layouts="", int across=0) -> Tensor[]',
    quantize_tensors,
    _quantize_fake,
    on_device,
)
