"""The step of a grouped layer: encoders and products of groups, decided once, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Direction, Quantizer
from lpq.formats.groups import GroupedOperand, why_not_row_by_row
from lpq.nn.encoded_inputs import Buffers
from lpq.nn.plan import Plan
from lpq.nn.step import Shapes, Step
from lpq.operations import encoded_stacks, group_products
from lpq.operations import groups as in_groups
from lpq.operations.binding import Encoded, Multiply, Operand
from lpq.operations.decoding import decode
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.encoder import Encoder
from lpq.operations.group_choice import OfProduct, decoded_at_once
from lpq.operations.group_products import GroupedProduct
from lpq.operations.group_tiles import spans
from lpq.operations.operands import State, state_names
from lpq.operations.sides import shared
from lpq.tensor import QuantizedTensor

DIRECTIONS: tuple[Direction, Direction] = ("row", "col")
Decided = tuple[bool, bool, bool]
"""Whether the operands of fprop, of dgrad and of wgrad are made decoded, in bf16."""


class Groups(NamedTuple):
    """Rows in groups, each of which meets a matrix of its own: how the tensors of a step are divided."""

    number: int
    at_once: bool
    """Whether the device computes all groups at once, by bound kernels, and nothing watches forward."""

    def step(self, plan: Plan, shapes: Shapes, encoder: object, product: object) -> Step:
        """Bind encoders and products of groups."""
        return _step(plan, shapes, self)


class _Bound(NamedTuple):
    """An encoder of rows in groups, or of a stack, and the operands that it makes."""

    row: GroupedOperand | Operand | None
    col: GroupedOperand | Operand | None
    encode: Callable[..., Encoded]
    """``encode(x, known, seeds)``, and for rows also where groups end; ``seeds`` has one for each group."""
    later: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
    """As ``Encoder.later``."""

    @property
    def encoder(self) -> Encoder:
        return Encoder(None, None, self.encode, self.later)


def _step(plan: Plan, s: Shapes, groups: Groups) -> Step:
    needs_dx, needs_dw, static = s.needs_dx, s.needs_dw, {memory.tensor for memory in plan.memories}
    fprop, dgrad, wgrad = _decided(plan, s, groups) if groups.at_once else (False, False, False)
    keeps_input = plan.keeps_input and needs_dw
    # Decoding the weight's column operand takes backward as long as making it anew of the weight, which is there.
    keeps_weight = (plan.keeps_weight or (dgrad and not _finds_lines(plan.w))) and needs_dx
    # A scale of a whole group is not decoded along lines: such an operand is made decoded now.
    x_decoded = wgrad and not keeps_input and spans(plan.x.side("col"), 1)
    if s.watched:  # then both operands of a product are decoded, or neither is
        dgrad, wgrad = False, x_decoded

    def rows(q: Quantizer, cols: int, dtype: torch.dtype, tensor: str) -> in_groups.Encoding:
        return in_groups.Encoding(
            q, True, needs_dw, (s.rows, cols), dtype, s.device, groups.number, groups.at_once, tensor in static,
            watched=s.watched,
        )  # fmt: skip

    of_x = rows(plan.x, s.features, s.x, "x")
    if s.given:
        x = _given(of_x)
    elif keeps_input:
        x = _rows_in_two_steps(of_x._replace(decoded=(fprop, wgrad)))
    else:
        x = _rows(of_x._replace(decoded=(fprop, x_decoded)))
    stack = groups.number, s.outputs, s.features
    of_w = encoded_stacks.Encoding(
        plan.w, True, needs_dx, stack, s.weight, s.device, groups.at_once and not s.watched, "w" in static,
        (fprop, dgrad and keeps_weight),
    )  # fmt: skip
    w = None if s.encoded else _stack_in_two_steps(of_w) if keeps_weight else _stack(of_w)
    w_row, w_col = _stored(plan.w, stack, s.weight) if w is None else (w.row, w.col)
    of_dy = rows(plan.dy, s.outputs, s.dtype, "dy")._replace(row=needs_dx, decoded=(dgrad, wgrad))
    dy = _given(of_dy) if s.arrived else _rows(of_dy)

    def product(a: Any, b: Any, dtype: torch.dtype, fast: bool) -> Multiply:
        how = GroupedProduct(a, b, groups.number, groups.at_once, dtype, s.device, fast, watched=s.watched)
        return group_products.bind(how)

    multiply = product(x.row, w_row, s.dtype, plan.fast[0])
    into_dx = product(dy.row, w_col, s.x, plan.fast[1]) if needs_dx else None
    into_dw = product(dy.col, x.col, s.summed, plan.fast[2]) if needs_dw else None
    takes = None if why_not_row_by_row(plan.dy) is not None else plan.dy
    encoders = x.encoder, None if w is None else w.encoder, dy.encoder
    return Step(*encoders, multiply, into_dx, into_dw, takes=takes)


def _rows(e: in_groups.Encoding) -> _Bound:
    (row, col), encode = in_groups.bind(e)
    return _Bound(row, col, encode)


def _stack(e: encoded_stacks.Encoding) -> _Bound:
    (row, col), encode = encoded_stacks.bind(e)
    return _Bound(row, col, encode)


def _rows_in_two_steps(e: in_groups.Encoding) -> _Bound:
    """Encode the row operand now, keep the rows, and make their column operand later."""
    forward, backward = e.decoded
    first, again = e._replace(col=False, decoded=(forward, False)), not backward and _turned(e.quantizer)
    second = e._replace(row=again, decoded=(False, backward))
    return _in_two_steps(e.quantizer, e.static, _rows(first), _rows(second))


def _stack_in_two_steps(e: encoded_stacks.Encoding) -> _Bound:
    """Encode the row operand now, keep the weight, and make its column operand later. Amaxes are found once where both
    operands have the same."""
    forward, backward = e.decoded
    first, again = e._replace(col=False, decoded=(forward, False)), not backward and _turned(e.quantizer)
    second = e._replace(row=again, decoded=(False, backward))
    if e.static or again or not e.at_once:
        return _in_two_steps(e.quantizer, e.static, _stack(first), _stack(second))
    known = _stack(second._replace(given=True))
    return _in_two_steps(e.quantizer, False, _stack(first._replace(measures=True)), _stack(second), known)


def _in_two_steps(
    quantizer: Quantizer, static: bool, first: _Bound, second: _Bound, of_known: _Bound | None = None
) -> _Bound:
    """Make one encoder of that of the row operand and that of the column operand. The second one has the random bits
    and the static statistics of the first one. ``of_known`` is the same for statistics that the first one measured."""
    keys, draws = state_names(quantizer) if static else [], rounds_stochastically(quantizer)
    ends = 1 if isinstance(first.row, GroupedOperand) else 0

    def encode(x: Tensor, state: State | None, seeds: Tensor | None, *offs: Tensor) -> Encoded:
        row, _, measured = first.encode(x, state, seeds, *offs)
        drawn = (seeds,) if draws and seeds is not None else ()
        return row, (x, *offs, *drawn, *(state[key] for key in keys if state is not None), *measured), ()

    def later(kept: Sequence[Tensor]) -> Sequence[Tensor]:
        x, offs, rest = kept[0], kept[1 : 1 + ends], kept[1 + ends :]
        seeds, known = (rest[0], rest[1:]) if draws else (None, rest)
        if of_known is not None and known:
            return of_known.encode(x, known, seeds, *offs)[1]
        return second.encode(x, dict(zip(keys, known, strict=True)) if keys else None, seeds, *offs)[1]

    return _Bound(first.row, second.col, encode, later)


def _given(e: in_groups.Encoding) -> _Bound:
    """The encoder of rows that are encoded already, each by itself: the column operand of each group is made of their
    row operand (``why_not_row_by_row``)."""
    side, of_col = e.quantizer.side("row"), e.quantizer.side("col")
    values = e._replace(quantizer=of_col, row=False, col=True, dtype=torch.float32, decoded=(False, False))
    (_, col), encode_values = in_groups.bind(values)
    assert col is not None

    def encode(x: QuantizedTensor, state: State | None, seeds: Tensor | None, offs: Tensor) -> Encoded:
        row, kept = row_given(x.operand("row").tensors(), offs, seeds)
        return row, kept if e.col else (), ()

    def later(kept: Sequence[Tensor]) -> Sequence[Tensor]:
        buffers, (offs, *seeds) = kept[: len(side.layout)], kept[len(side.layout) :]
        decoded = decode(side.storage.wrap(buffers, side, e.shape, e.dtype), torch.float32)
        made = encode_values(decoded, None, seeds[0] if seeds else None, offs)[1]
        # It stands for the rows, and not for what was decoded.
        pairs = zip(of_col.layout, made, strict=False)
        return *(t.to(e.dtype) if buffer.dtype is None else t for buffer, t in pairs), offs

    return _Bound(GroupedOperand(side, e.shape, e.dtype, 0), col._replace(dtype=e.dtype), encode, later)


def row_given(buffers: Sequence[Tensor], offs: Tensor, seeds: Tensor | None) -> Buffers:
    """The buffers of the row operand of rows in groups, and what is kept of them until the column operand is made."""
    row = *buffers, offs
    return row, row if seeds is None else (*row, seeds)


def _stored(quantizer: Quantizer, stack: tuple[int, int, int], dtype: torch.dtype) -> tuple[Operand, Operand]:
    """The operands of a weight that is encoded already."""
    count, high, wide = stack
    return (
        Operand(quantizer.side("row"), (count, high, wide), dtype),
        Operand(quantizer.side("col"), (count, wide, high), dtype),
    )


def _turned(quantizer: Quantizer) -> bool:
    """Whether the column operand has the random bits of the row operand, of which it is made."""
    return shared(quantizer.side("row"), quantizer.side("col")) and quantizer.side("col").stochastic


def _finds_lines(quantizer: Quantizer) -> bool:
    """Whether the column operand needs amaxes of whole lines, and so one more read, but can be decoded at once."""
    side = quantizer.side("col")
    whole = any(buffer.block[0] is None for buffer in side.layout)
    return not whole and any(stat.block[1] is None for stat in side.stats)


def _decided(plan: Plan, s: Shapes, groups: Groups) -> Decided:
    x, w, dy = plan.x, plan.w, plan.dy
    if "row" in (x.col_source, w.col_source, dy.col_source):
        return False, False, False
    (x_row, x_col), (dy_row, dy_col) = ([OfProduct(q.side(d), d) for d in DIRECTIONS] for q in (x, dy))
    w_row, w_col = (OfProduct(w.side(d), d, stack=True) for d in DIRECTIONS)
    how = s.rows, (groups.number, s.outputs, s.features), s.device
    return (
        decoded_at_once(x_row, w_row, *how),
        decoded_at_once(dy_row, w_col, *how),
        decoded_at_once(dy_col, x_col, *how),
    )
