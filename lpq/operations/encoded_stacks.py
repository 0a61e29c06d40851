"""Stacks encoded for a step: each matrix by itself, all in one launch where kernels make the operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lpq import registry
from lpq.formats.format import Storage
from lpq.operations import sectioned
from lpq.operations.binding import Encoded
from lpq.operations.operands import State, encode_operands
from lpq.operations.quantizing import quantize
from lpq.operations.sectioned import Pair, SectionsEncoding

Run = Callable[[Tensor, State | Sequence[Tensor] | None, Tensor | None], Encoded]
"""``run(w, known, seeds)``: the buffers of both operands, and the amaxes if they are wanted. ``known`` is a state, or
amaxes that were found before; ``seeds`` has one for each matrix."""


def bind(e: SectionsEncoding) -> tuple[Pair, Run]:
    """Bind the encoding of each matrix of a stack by itself."""
    quantizer = e.quantizer
    sides = quantizer.side("row") if e.row else None, quantizer.side("col") if e.col else None
    row, col = (None if side is None or side.plain else side for side in sides)
    kernels = None if e.watched else sectioned.bind_any(e, row, col)
    decoded = (False, False) if kernels is None else kernels[1]
    operands = e.operand(0, decoded=decoded[0]) if e.row else None, e.operand(1, decoded=decoded[1]) if e.col else None
    if kernels is None:
        return operands, lambda w, known, seeds: _tensors(*_by_itself(e, w, known, seeds))
    run, again = kernels[0], e.measures and sectioned.same_amaxes(quantizer.side("row"), quantizer.side("col"))
    first, second = (side if one is None else None for one, side in zip((row, col), sides, strict=True))

    def encode(w: Tensor, known: State | Sequence[Tensor] | None, seeds: Tensor | None) -> Encoded:
        of_row, of_col, found = run(w, None, (None, known[0]) if e.given else known, seeds)  # type: ignore[index]
        amaxes = (found[0],) if again and found[0] is not None else ()
        if first is None and second is None:
            return of_row, of_col, amaxes
        plain_row, plain_col, _ = _tensors(*quantize(w, None, first, second)[:2])
        return of_row if first is None else plain_row, of_col if second is None else plain_col, amaxes

    return operands, encode


bind_few = registry.cached_few(lambda e, kernels: bind(e))
"""``bind`` for steps that differ in their numbers of rows alone; ``kernels`` is ``LPQ_KERNELS``."""


def _by_itself(
    e: SectionsEncoding, w: Tensor, known: object, seeds: Tensor | None
) -> tuple[Storage | None, Storage | None]:
    state = known if e.static else None
    return encode_operands(e.quantizer, w, row=e.row, col=e.col, seed=seeds, state=state)[:2]  # type: ignore[arg-type]


def _tensors(row: Storage | None, col: Storage | None) -> Encoded:
    return () if row is None else row.tensors(), () if col is None else col.tensors(), ()
