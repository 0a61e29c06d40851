"""Stacks encoded for a step: each matrix by itself, all in one launch where kernels make the operands."""

from __future__ import annotations

from torch import Tensor

from lpq.formats.format import Quantizer, Storage
from lpq.operations import sectioned
from lpq.operations.exact_form import Multiplicand
from lpq.operations.operands import State, encode_operands
from lpq.operations.operators import can_call_directly
from lpq.operations.quantizing import quantize


def encode_stack(
    quantizer: Quantizer,
    w: Tensor,
    *,
    row: bool,
    col: bool,
    seeds: Tensor | None = None,
    decoded: tuple[bool, bool] = (False, False),
    state: State | None = None,
    amaxes: Tensor | None = None,
) -> tuple[Storage | None, Storage | None, Tensor | None]:
    """Encode each matrix of the stack ``w`` by itself into the wanted operands; ``decoded`` and ``state`` as in
    ``encode_groups``. Also return the amaxes of the matrices, where the column operand can be made later with them as
    ``amaxes``, so that they are found once."""
    sides = quantizer.side("row") if row else None, quantizer.side("col") if col else None
    encoded = [None if side is None or side.plain else side for side in sides]
    made = None
    if encoded != [None, None] and w.is_cuda and quantizer.col_source == "original" and can_call_directly(w):
        given = sectioned.given_of(quantizer, encoded[0], encoded[1], state)
        given = given if amaxes is None else (given[0], amaxes)
        made = sectioned.encode(w, None, encoded[0], encoded[1], seeds, decoded, given)
    if made is not None:
        first, second = (side if e is None else None for e, side in zip(encoded, sides, strict=True))
        none = first is None and second is None
        plain = (None, None) if none else quantize(w, None, first, second)[:2]
        each = enumerate(zip(encoded, made[:2], decoded, plain, strict=True))
        row_operand, col_operand = (
            _made(side, tensors, dim, w, is_decoded) if side is not None else other
            for dim, (side, tensors, is_decoded, other) in each
        )
        again = row and state is None and sectioned.same_amaxes(quantizer.side("row"), quantizer.side("col"))
        return row_operand, col_operand, made[2][0] if again else None
    both = encode_operands(quantizer, w, row=row, col=col, seed=seeds, state=state)
    return both.row, both.col, None


def _made(side: Quantizer, tensors: list[Tensor], dim: int, w: Tensor, decoded: bool) -> Storage:
    """An operand of the stack ``w``, over its buffers."""
    count, high, wide = w.shape
    shape = (count, high, wide) if dim == 0 else (count, wide, high)
    if decoded:
        return Multiplicand.over(tensors, 1.0, side, shape, w.dtype)
    return side.storage.wrap(tensors, side, shape, w.dtype)
