"""The step of a grouped layer: encoders and products of groups, decided once, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Quantizer
from lpq.formats.groups import why_not_row_by_row
from lpq.formats.sections import Sections
from lpq.kernels.table import kernels_allowed
from lpq.nn.encoded_inputs import Buffers
from lpq.nn.plan import Plan
from lpq.nn.step import Shapes, Step
from lpq.operations import encoded_stacks, group_products
from lpq.operations import groups as in_groups
from lpq.operations.binding import Encoded, Multiply, Product
from lpq.operations.decoding import decode
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.encoder import Encoder
from lpq.operations.group_choice import decoded_at_once
from lpq.operations.group_tiles import spans
from lpq.operations.operands import State, state_names
from lpq.operations.sectioned import SectionsEncoding
from lpq.operations.sides import shared
from lpq.tensor import QuantizedTensor


class Groups(NamedTuple):
    """Rows in groups, each of which meets a matrix of its own: how the tensors of a step are divided."""

    number: int
    at_once: bool
    """Whether the device computes all groups at once, by bound kernels, and nothing watches forward."""

    def step(self, plan: Plan, shapes: Shapes, encoder: object, product: object) -> Step:
        """Bind encoders and products of groups."""
        return _step(plan, shapes, self)


def _step(plan: Plan, s: Shapes, groups: Groups) -> Step:
    needs_dx, needs_dw, static = s.needs_dx, s.needs_dw, {memory.tensor for memory in plan.memories}
    rows, stack = (Sections(groups.number, is_stack, groups.at_once) for is_stack in (False, True))
    of_x = SectionsEncoding(
        plan.x, True, needs_dw, (s.rows, s.features), s.x, s.device, rows, "x" in static, watched=s.watched
    )
    of_w = of_x._replace(
        quantizer=plan.w, col=needs_dx, shape=(s.outputs, s.features), dtype=s.weight, sections=stack,
        static="w" in static,
    )  # fmt: skip
    of_dy = of_x._replace(
        quantizer=plan.dy, row=needs_dx, shape=(s.rows, s.outputs), dtype=s.dtype, static="dy" in static
    )
    # Whether the operands of each product are made decoded, in bf16.
    fprop = dgrad = wgrad = False
    if groups.at_once and "row" not in (plan.x.col_source, plan.w.col_source, plan.dy.col_source):
        products = (of_x, of_w, 0, 0), (of_dy, of_w, 0, 1), (of_dy, of_x, 1, 1)
        fprop, dgrad, wgrad = (decoded_at_once(a.operand(i), b.operand(j), s.device) for a, b, i, j in products)
    keeps_input = plan.keeps_input and needs_dw
    # Decoding the weight's column operand takes backward as long as making it anew of the weight, which is there.
    keeps_weight = (plan.keeps_weight or (dgrad and not _finds_lines(plan.w))) and needs_dx
    # A scale of a whole group is not decoded along lines: such an operand is made decoded now.
    x_decoded = wgrad and not keeps_input and spans(plan.x.side("col"), 1)
    if s.watched:  # then both operands of a product are decoded, or neither is
        dgrad, wgrad = False, x_decoded
    if s.given:
        x = _of_row_operand(of_x)
    elif keeps_input:
        x = _in_two_steps(of_x._replace(decoded=(fprop, wgrad)))
    else:
        x = _bind(of_x._replace(decoded=(fprop, x_decoded)))
    of_w = of_w._replace(decoded=(fprop, dgrad and keeps_weight))
    w = None if s.encoded else _in_two_steps(of_w) if keeps_weight else _bind(of_w)
    w_row, w_col = [of_w.operand(dim) for dim in (0, 1)] if w is None else (w.row, w.col)
    of_dy = of_dy._replace(decoded=(dgrad, wgrad))
    dy = _of_row_operand(of_dy) if s.arrived else _bind(of_dy)

    def product(a: Any, b: Any, dtype: torch.dtype, fast: bool) -> Multiply:
        bind = group_products.through_operators if s.watched else group_products.bind
        return bind(Product(a, b, dtype, s.device, fast))

    multiply = product(x.row, w_row, s.dtype, plan.fast[0])
    into_dx = product(dy.row, w_col, s.x, plan.fast[1]) if needs_dx else None
    into_dw = product(dy.col, x.col, s.summed, plan.fast[2]) if needs_dw else None
    reason = why_not_row_by_row(plan.dy)
    refuses = None if reason is None else f"groups of rows are not what dy={plan.dy} makes of all together: {reason}"
    return Step(x, w, dy, multiply, into_dx, into_dw, refuses)


def _bind(e: SectionsEncoding) -> Encoder:
    if not e.sections.stack:
        (row, col), encode = in_groups.bind(e)
        return Encoder(row, col, encode)
    how: tuple[Any, Any] = encoded_stacks.bind(e) if e.watched else encoded_stacks.bind_few(e, kernels_allowed())
    (row, col), encode_stack = how
    return Encoder(row, col, encode_stack)


def _in_two_steps(e: SectionsEncoding) -> Encoder:
    """Encode the row operand now, keep the tensor, and make its column operand later, with the same random bits and
    static statistics. The amaxes of a stack are found once where both operands have the same."""
    (forward, backward), keys, ends = e.decoded, state_names(e.quantizer) if e.static else [], not e.sections.stack
    row, col, draws = e.quantizer.side("row"), e.quantizer.side("col"), rounds_stochastically(e.quantizer)
    again = not backward and shared(row, col) and col.stochastic  # those random bits are the row operand's
    once = e.sections.stack and not (keys or again or e.watched)
    first = _bind(e._replace(col=False, decoded=(forward, False), measures=once))
    second = _bind(e._replace(row=again, decoded=(False, backward)))
    known_once = _bind(e._replace(row=False, decoded=(False, backward), given=True)) if once else second

    def encode(x: Tensor, state: State | None, seeds: Tensor | None, *offs: Tensor) -> Encoded:
        made, _, measured = first.encode(x, state, seeds, *offs)
        drawn = (seeds,) if draws and seeds is not None else ()
        return made, (x, *offs, *drawn, *(state[key] for key in keys if state is not None), *measured), ()

    def later(kept: Sequence[Tensor]) -> Sequence[Tensor]:
        x, offs, rest = kept[0], kept[1 : 1 + ends], kept[1 + ends :]
        seeds, known = (rest[0], rest[1:]) if draws else (None, rest)
        if once and known:
            return known_once.encode(x, known, seeds, *offs)[1]
        return second.encode(x, dict(zip(keys, known, strict=True)) if keys else None, seeds, *offs)[1]

    return Encoder(first.row, second.col, encode, later)


def _of_row_operand(e: SectionsEncoding) -> Encoder:
    """The encoder of rows that are encoded already, each by itself: the column operand of each group is made of their
    row operand (``why_not_row_by_row``)."""
    side, of_col = e.quantizer.side("row"), e.quantizer.side("col")
    values = e._replace(quantizer=of_col, row=False, col=True, dtype=torch.float32, decoded=(False, False))
    _, encode_values = in_groups.bind(values)

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

    return Encoder(e.operand(0), e.operand(1), encode, later)


def row_given(buffers: Sequence[Tensor], offs: Tensor, seeds: Tensor | None) -> Buffers:
    """The buffers of the row operand of rows in groups, and what is kept of them until the column operand is made."""
    row = *buffers, offs
    return row, row if seeds is None else (*row, seeds)


def _finds_lines(quantizer: Quantizer) -> bool:
    """Whether the column operand needs amaxes of whole lines, and so one more read, but can be decoded at once."""
    side = quantizer.side("col")
    whole = any(buffer.block[0] is None for buffer in side.layout)
    return not whole and any(stat.block[1] is None for stat in side.stats)
