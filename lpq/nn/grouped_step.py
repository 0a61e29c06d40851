"""A plan bound to the shapes of rows in groups: encoders and products of sections, decided once, whatever the number
of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Direction, Quantizer
from lpq.formats.groups import GroupedOperand, why_not_row_by_row
from lpq.nn.plan import Plan
from lpq.operations import encoded_stacks, group_products, groups
from lpq.operations.binding import Encoded, Multiply, Operand
from lpq.operations.decoding import decode
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.group_choice import OfProduct, decoded_at_once
from lpq.operations.group_products import GroupedProduct
from lpq.operations.group_tiles import spans
from lpq.operations.operands import State, state_names
from lpq.operations.sides import shared

DIRECTIONS: tuple[Direction, Direction] = ("row", "col")
Decided = tuple[bool, bool, bool]
"""Whether the operands of fprop, of dgrad and of wgrad are made decoded, in bf16."""


class Shapes(NamedTuple):
    """The properties of a pass that a step is bound to."""

    rows: int
    features: int
    outputs: int
    groups: int
    x: torch.dtype
    weight: torch.dtype
    dtype: torch.dtype
    """The dtype of the result."""
    summed: torch.dtype
    """The dtype of the gradient of the weight."""
    device: torch.device
    at_once: bool
    """Whether the device computes all groups at once."""
    needs_dx: bool
    needs_dw: bool
    encoded: bool
    """Whether the operands of the weight are given, so that none is encoded."""
    given: bool
    """Whether the row operand of the rows is given."""
    watched: bool = False
    """Whether a tracer or a mode watches, so that operators encode and multiply."""
    arrived: bool = False
    """Whether the gradients of the results arrive encoded."""
    forward: Decided | None = None
    """The decisions of a forward that nothing watched, if it is watched now or gradients arrive encoded."""
    kernels: object = None
    """The value of ``LPQ_KERNELS`` under which kernels are chosen."""


Encode = Callable[[Any, Any, Tensor | None, Tensor], Encoded]
"""``encode(x, known, seeds, offs)``: ``known`` is a state, or statistics that were measured; ``seeds`` has one for each
group; the groups end at ``offs``."""


class Encoder(NamedTuple):
    """Encodes rows in groups, or a stack, of one shape."""

    row: GroupedOperand | Operand | None
    col: GroupedOperand | Operand | None
    """The operands that it makes."""
    encode: Encode
    later: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
    """Makes the buffers of the column operand from the tensors that ``encode`` returned in their place; None:
    ``encode`` returned the buffers."""


class Step(NamedTuple):
    """A plan bound to shapes."""

    x: Encoder
    w: Encoder | None
    """None: the weight is encoded already."""
    dy: Encoder
    fprop: Multiply
    dgrad: Multiply | None
    """None: that gradient is not wanted."""
    wgrad: Multiply | None
    decided: Decided
    takes: Quantizer | None
    """The quantizer of gradients of results that may arrive encoded; None: they may not."""


def bind(plan: Plan, s: Shapes) -> Step:
    """Decide now all that a step of these shapes does."""
    needs_dx, needs_dw, static = s.needs_dx, s.needs_dw, {memory.tensor for memory in plan.memories}
    decided = s.forward
    if decided is None:
        decided = (False, False, False) if s.watched or not s.at_once else _decided(plan, s)
    fprop, dgrad, wgrad = decided
    keeps_input = plan.keeps_input and needs_dw
    # Decoding the weight's column operand takes backward as long as making it anew of the weight, which is there.
    keeps_weight = (plan.keeps_weight or (dgrad and not _finds_lines(plan.w))) and needs_dx
    # A scale of a whole group is not decoded along lines: such an operand is made decoded now.
    x_decoded = wgrad and not keeps_input and spans(plan.x.side("col"), 1)
    if s.forward is not None:  # both operands of a product are decoded, or neither is
        dgrad, wgrad = False, x_decoded

    def rows(q: Quantizer, cols: int, dtype: torch.dtype, tensor: str) -> groups.Encoding:
        return groups.Encoding(
            q, True, needs_dw, (s.rows, cols), dtype, s.device, s.groups, s.at_once, tensor in static,
            watched=s.watched,
        )  # fmt: skip

    of_x = rows(plan.x, s.features, s.x, "x")
    if s.given:
        x = _given(of_x)
    elif keeps_input:
        x = _rows_in_two_steps(of_x._replace(decoded=(fprop, wgrad)))
    else:
        x = _rows(of_x._replace(decoded=(fprop, x_decoded)))
    stack = s.groups, s.outputs, s.features
    of_w = encoded_stacks.Encoding(
        plan.w, True, needs_dx, stack, s.weight, s.device, s.at_once and not s.watched, "w" in static,
        (fprop, dgrad and keeps_weight),
    )  # fmt: skip
    w = None if s.encoded else _stack_in_two_steps(of_w) if keeps_weight else _stack(of_w)
    w_row, w_col = _stored(plan.w, stack, s.weight) if w is None else (w.row, w.col)
    of_dy = rows(plan.dy, s.outputs, s.dtype, "dy")._replace(row=needs_dx, decoded=(dgrad, wgrad))
    dy = _given(of_dy) if s.arrived else _rows(of_dy)
    assert isinstance(x.row, GroupedOperand)
    assert w_row is not None
    fast = plan.fast
    multiply, into_dx, into_dw = _product(s, x.row, w_row, s.dtype, fast[0]), None, None
    if needs_dx:
        assert isinstance(dy.row, GroupedOperand)
        assert w_col is not None
        into_dx = _product(s, dy.row, w_col, s.x, fast[1])
    if needs_dw:
        assert isinstance(dy.col, GroupedOperand)
        assert x.col is not None
        into_dw = _product(s, dy.col, x.col, s.summed, fast[2])
    takes = None if why_not_row_by_row(plan.dy) is not None else plan.dy
    return Step(x, w, dy, multiply, into_dx, into_dw, decided, takes)


bind_few = registry.cached_few(bind)
"""``bind`` for all layers of a model that have the same plan and shapes."""


def _product(s: Shapes, a: GroupedOperand, b: GroupedOperand | Operand, dtype: torch.dtype, fast: bool) -> Multiply:
    return group_products.bind(GroupedProduct(a, b, s.groups, s.at_once, dtype, s.device, fast, watched=s.watched))


def _rows(e: groups.Encoding) -> Encoder:
    operands, encode = groups.bind(e)
    return Encoder(*operands, encode)


def _stack(e: encoded_stacks.Encoding) -> Encoder:
    operands, encode = encoded_stacks.bind(e)
    return Encoder(*operands, lambda w, known, seeds, offs: encode(w, known, seeds))


def _rows_in_two_steps(e: groups.Encoding) -> Encoder:
    """Encode the row operand now, keep the rows, and make their column operand later."""
    forward, backward = e.decoded
    first, again = e._replace(col=False, decoded=(forward, False)), not backward and _turned(e.quantizer)
    second = e._replace(row=again, decoded=(False, backward))
    return _in_two_steps(e.quantizer, e.static, _rows(first), _rows(second))


def _stack_in_two_steps(e: encoded_stacks.Encoding) -> Encoder:
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
    quantizer: Quantizer, static: bool, first: Encoder, second: Encoder, of_known: Encoder | None = None
) -> Encoder:
    """Make one encoder of that of the row operand and that of the column operand. The second one has the random bits
    and the static statistics of the first one. ``of_known`` is the same for statistics that the first one measured."""
    keys, draws = state_names(quantizer) if static else [], rounds_stochastically(quantizer)

    def encode(x: Tensor, state: State | None, seeds: Tensor | None, offs: Tensor) -> Encoded:
        row, _, measured = first.encode(x, state, seeds, offs)
        drawn = (seeds,) if draws and seeds is not None else ()
        return row, (x, offs, *drawn, *(state[key] for key in keys if state is not None), *measured), ()

    def later(kept: Sequence[Tensor]) -> Sequence[Tensor]:
        (x, offs), seeds, known = kept[:2], kept[2] if draws else None, kept[2 + draws :]
        if of_known is not None and known:
            return of_known.encode(x, known, seeds, offs)[1]
        return second.encode(x, dict(zip(keys, known, strict=True)) if keys else None, seeds, offs)[1]

    return Encoder(first.row, second.col, encode, later)


def _given(e: groups.Encoding) -> Encoder:
    """The encoder of rows whose row operand is given, by its buffers: the column operand of each group is made of it
    (``why_not_row_by_row``)."""
    row, of_col = GroupedOperand(e.quantizer.side("row"), e.shape, e.dtype, 0), e.quantizer.side("col")
    decoded = e._replace(quantizer=of_col, row=False, col=True, dtype=torch.float32, decoded=(False, False))
    (_, col), encode_values = groups.bind(decoded)
    assert col is not None

    def encode(buffers: Sequence[Tensor], state: State | None, seeds: Tensor | None, offs: Tensor) -> Encoded:
        made = *buffers, offs
        return made, () if not e.col else made if seeds is None else (*made, seeds), ()

    def later(kept: Sequence[Tensor]) -> Sequence[Tensor]:
        buffers, (offs, *seeds) = kept[: len(row.quantizer.layout)], kept[len(row.quantizer.layout) :]
        values = decode(row.quantizer.storage.wrap(buffers, row.quantizer, e.shape, e.dtype), torch.float32)
        made = encode_values(values, None, seeds[0] if seeds else None, offs)[1]
        # It stands for the rows, and not for what was decoded.
        pairs = zip(of_col.layout, made, strict=False)
        return *(t.to(e.dtype) if buffer.dtype is None else t for buffer, t in pairs), offs

    return Encoder(row, col._replace(dtype=e.dtype), encode, later)


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


def _decided(plan: Plan, s: Shapes) -> Decided:
    x, w, dy = plan.x, plan.w, plan.dy
    if "row" in (x.col_source, w.col_source, dy.col_source):
        return False, False, False
    (x_row, x_col), (dy_row, dy_col) = ([OfProduct(q.side(d), d) for d in DIRECTIONS] for q in (x, dy))
    w_row, w_col = (OfProduct(w.side(d), d, stack=True) for d in DIRECTIONS)
    how = s.rows, (s.groups, s.outputs, s.features), s.device
    return (
        decoded_at_once(x_row, w_row, *how),
        decoded_at_once(dy_row, w_col, *how),
        decoded_at_once(dy_col, x_col, *how),
    )
