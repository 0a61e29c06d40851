"""Stacks encoded for a step: each matrix by itself, all in one launch where kernels make the operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Quantizer, Storage
from lpq.operations import sectioned
from lpq.operations.binding import Encoded, Operand
from lpq.operations.exact_form import Form
from lpq.operations.operands import State, encode_operands
from lpq.operations.quantizing import quantize

DECODED = Form()
"""The form of the matrices of a stack that exists decoded only."""


class Encoding(NamedTuple):
    """How stacks are encoded, described by all but the tensors."""

    quantizer: Quantizer
    row: bool
    col: bool
    """The operands that are wanted."""
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    at_once: bool
    """Whether kernels may encode all matrices at once."""
    static: bool = False
    """Whether there are static statistics, with one for each matrix along their first dimension."""
    decoded: tuple[bool, bool] = (False, False)
    """Whether only the decoded values of the row operand, and of the column operand, are wanted."""
    measures: bool = False
    """Whether the amaxes of the matrices are returned, if the column operand can be made later with them."""
    given: bool = False
    """Whether the amaxes of the matrices are given, for a column operand alone."""


Pair = tuple[Operand | None, Operand | None]
Run = Callable[[Tensor, State | Sequence[Tensor] | None, Tensor | None], Encoded]
"""``run(w, known, seeds)``: the buffers of both operands, and the amaxes if they are wanted. ``known`` is a state, or
amaxes that were found before; ``seeds`` has one for each matrix."""


def bind(e: Encoding) -> tuple[Pair, Run]:
    """Bind the encoding of each matrix of a stack by itself."""
    (count, high, wide), quantizer = e.shape, e.quantizer
    sides = quantizer.side("row") if e.row else None, quantizer.side("col") if e.col else None
    row, col = (None if side is None or side.plain else side for side in sides)
    made = None
    if e.at_once and (row is not None or col is not None):
        decoded = e.decoded[0] and row is not None, e.decoded[1] and col is not None
        in_sections = sectioned.InSections(
            row, col, count * high, wide, count, True, decoded, e.dtype, e.device, given=(False, e.given)
        )
        made = sectioned.bind_any(quantizer, in_sections, e.static)
    forms = [DECODED if made is not None and made[1][dim] else None for dim in (0, 1)]
    operands = (
        None if sides[0] is None else Operand(sides[0], (count, high, wide), e.dtype, forms[0]),
        None if sides[1] is None else Operand(sides[1], (count, wide, high), e.dtype, forms[1]),
    )
    if made is None:
        return operands, lambda w, known, seeds: _tensors(*_by_itself(e, w, known, seeds))
    run, again = made[0], e.measures and sectioned.same_amaxes(quantizer.side("row"), quantizer.side("col"))
    first, second = (side if one is None else None for one, side in zip((row, col), sides, strict=True))

    def encode(w: Tensor, known: State | Sequence[Tensor] | None, seeds: Tensor | None) -> Encoded:
        of_row, of_col, found = run(w, None, (None, known[0]) if e.given else known, seeds)  # type: ignore[index]
        amaxes = (found[0],) if again and found[0] is not None else ()
        if first is None and second is None:
            return of_row, of_col, amaxes
        plain_row, plain_col, _ = _tensors(*quantize(w, None, first, second)[:2])
        return of_row if first is None else plain_row, of_col if second is None else plain_col, amaxes

    return operands, encode


def _by_itself(e: Encoding, w: Tensor, known: object, seeds: Tensor | None) -> tuple[Storage | None, Storage | None]:
    state = known if e.static else None
    return encode_operands(e.quantizer, w, row=e.row, col=e.col, seed=seeds, state=state)[:2]  # type: ignore[arg-type]


def _tensors(row: Storage | None, col: Storage | None) -> Encoded:
    return () if row is None else row.tensors(), () if col is None else col.tensors(), ()
