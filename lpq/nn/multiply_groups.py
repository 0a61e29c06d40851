"""The three products of a grouped layer as one autograd function. Each group's rows meet the matrix of their group.

fprop  y = x.row · w.row        dgrad  dx = dy.row · w.col        wgrad  dw = dy.col · x.col
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Direction, Quantizer, Storage, check_there
from lpq.formats.groups import Grouped, why_not_row_by_row
from lpq.kernels.table import kernels_allowed
from lpq.nn.accumulation import Accumulate, is_summed, sum_in_place
from lpq.nn.cached_weight import as_it_is, written_since
from lpq.nn.encoded_inputs import Buffers
from lpq.nn.input_checks import check_backward, check_gradient
from lpq.nn.plan import Plan
from lpq.nn.wanted import asked
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.encoded_stacks import encode_stack
from lpq.operations.group_choice import OfProduct, decoded_at_once
from lpq.operations.group_products import multiply_columns, multiply_rows, sum_rows
from lpq.operations.group_tiles import spans
from lpq.operations.groups import derive_columns, encode_groups
from lpq.operations.operands import State
from lpq.operations.operators import can_call_directly
from lpq.tensor import QuantizedTensor

DIRECTIONS: tuple[Direction, Direction] = ("row", "col")


class GroupedCall(NamedTuple):
    """The arguments of one pass of a grouped layer beside its tensors."""

    plan: Plan
    dtype: torch.dtype
    """The dtype of the result."""
    needs_dx: bool
    needs_dw: bool
    weight: Buffers | None = None
    """The buffers of the operands of the weight, if it is encoded already."""
    accumulate: Accumulate | None = None
    input: Sequence[Tensor] | None = None
    """The buffers of the row operand of the rows, if these are encoded already: the column operand is made of it."""
    states: Mapping[str, State] = {}
    """Static statistics of each tensor, with one for each group."""
    title: str = ""
    """The layer's name in messages."""


class GroupedMultiplication(torch.autograd.Function):
    """The three products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, seeds: Tensor | None, call: GroupedCall
    ) -> Tensor:
        plan, dtype, needs_dx, needs_dw, encoded, accumulate, given, states, _ = call
        fprop, dgrad, wgrad = _decoded(plan, x, weight)
        keeps_input = plan.keeps_input and needs_dw and given is None
        # Decoding the weight's column operand takes backward as long as making it anew of the weight, which is there.
        keeps_weight = (plan.keeps_weight or (dgrad and not _finds_lines(plan.w))) and needs_dx and encoded is None
        # A scale of a whole group is not decoded along lines: such an operand is made decoded now.
        made = fprop, wgrad and spans(plan.x.side("col"), 1)
        x_row: Grouped | None
        if given is not None:
            x_row, x_col = Grouped(plan.x.side("row"), given, (x.shape[0], x.shape[1]), x.dtype, 0), None
        else:
            x_row, x_col = encode_groups(
                plan.x, x, offs, row=True, col=needs_dw and not keeps_input, seeds=_of(seeds, 0), decoded=made,
                state=states.get("x"),
            )  # fmt: skip
        assert x_row is not None
        if encoded is None:
            col = needs_dx and not keeps_weight
            w_row, w_col, amaxes = encode_stack(
                plan.w, weight, row=True, col=col, seeds=_of(seeds, 1), decoded=(fprop, False), state=states.get("w")
            )
            assert w_row is not None
        else:
            (w_row, w_col), amaxes = _wrapped(plan, weight, encoded), None
            if not torch.compiler.is_compiling():
                check_there(w_row.tensors()[0])
        y = multiply_rows(x_row, w_row, offs, bias, dtype, plan.fast[0])
        of_x = [x] if keeps_input else [] if x_col is None else [*x_col.tensors]
        if given is not None and needs_dw:
            of_x = [*given]
        if keeps_weight:
            of_w = [weight] if amaxes is None else [weight, amaxes]
        else:
            of_w = [] if w_col is None else w_col.tensors()
        ctx.save_for_backward(offs, *([] if seeds is None else [seeds]), *of_x, *of_w)
        ctx.call, ctx.count, ctx.keeps = call, len(of_x), (keeps_input, keeps_weight)
        ctx.decoded = dgrad, wgrad, x_col is not None and x_col.decoded
        ctx.shapes = tuple(x.shape), tuple(weight.shape), x.dtype, weight.dtype
        ctx.bias = None if bias is None else bias.dtype
        watched = isinstance(weight, QuantizedTensor) and needs_dx and not torch.compiler.is_compiling()
        ctx.watched = (weight, as_it_is(weight)) if watched else None
        ctx.weight = weight if accumulate is not None else None
        sums = bias is not None and bias.requires_grad  # of the gradients in high precision
        ctx.encoded_gradient = None if sums or why_not_row_by_row(plan.dy) is not None else plan.dy
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(dy)
        check_gradient(ctx.call.title, dy, ctx.encoded_gradient)
        if ctx.watched is not None and as_it_is(ctx.watched[0]) != ctx.watched[1]:
            raise written_since(ctx.watched[0], "a weight")
        plan: Plan = ctx.call.plan
        states = ctx.call.states
        (rows, features), (groups, outputs, _), x_dtype, w_dtype = ctx.shapes
        offs, *saved = ctx.saved_tensors
        seeds, saved = (saved[0], saved[1:]) if plan.stochastic else (None, saved)  # torch 2.11 traces it as a tuple
        needs_dx, needs_dw, needs_db = asked(ctx)
        dx = dw = db = None
        dgrad, wgrad, x_decoded = ctx.decoded
        if not can_call_directly(dy):  # yet both operands of a product are decoded, or neither is
            dgrad, wgrad = False, x_decoded
        if isinstance(dy, QuantizedTensor):
            dy_row, dy_col = _arrived(plan.dy, dy, offs, needs_dx, needs_dw, _of(seeds, 2))
        else:
            dy_row, dy_col = encode_groups(
                plan.dy, dy, offs, row=needs_dx, col=needs_dw, seeds=_of(seeds, 2), decoded=(dgrad, wgrad),
                state=states.get("dy"),
            )  # fmt: skip
        if dy_row is not None:
            of_w, side = saved[ctx.count :], plan.w.side("col")
            if ctx.keeps[1]:
                # The row operand, too, where the column operand depends on it.
                row = not dgrad and (plan.w.col_source == "row" or rounds_stochastically(plan.w))
                amaxes = of_w[1] if len(of_w) > 1 and not row else None
                _, w_col, _ = encode_stack(
                    plan.w, of_w[0], row=row, col=True, seeds=_of(seeds, 1), decoded=(False, dgrad),
                    state=states.get("w"), amaxes=amaxes,
                )  # fmt: skip
                assert w_col is not None
            else:
                w_col = side.storage.wrap(of_w, side, (groups, features, outputs), w_dtype)
            dx = multiply_rows(dy_row, w_col, offs, None, x_dtype, plan.fast[1])
        if dy_col is not None:
            of_x, side = saved[: ctx.count], plan.x.side("col")
            x_col: Grouped | None
            if ctx.call.input is not None:
                x_row = Grouped(plan.x.side("row"), of_x, (rows, features), x_dtype, 0)
                x_col = derive_columns(plan.x, x_row, offs, _of(seeds, 0))
            elif ctx.keeps[0]:  # the row operand, too: random bits of its own may be in both
                _, x_col = encode_groups(
                    plan.x, of_x[0], offs, row=not wgrad, col=True, seeds=_of(seeds, 0), decoded=(False, wgrad),
                    state=states.get("x"),
                )  # fmt: skip
                assert x_col is not None
            else:
                x_col = Grouped(side, of_x, (features, rows), x_dtype, 1, x_decoded)
            into = None
            if ctx.weight is not None and is_summed(ctx.next_functions[1][0]):
                into = sum_in_place(ctx.weight, ctx.call.accumulate)
            dw = multiply_columns(dy_col, x_col, offs, w_dtype if into is None else into.dtype, plan.fast[2])
            if into is not None:
                into.add_(dw)
                dw = None
        if needs_db:
            db = sum_rows(dy, offs).to(ctx.bias)
        return dx, dw, db, None, None, None


def _arrived(
    quantizer: Quantizer, dy: QuantizedTensor, offs: Tensor, row: bool, col: bool, seeds: Tensor | None
) -> tuple[Grouped | None, Grouped | None]:
    """The operands of gradients that arrived encoded, by the quantizer ``encoded_gradient`` of the pass."""
    made = Grouped(quantizer.side("row"), dy.operand("row").tensors(), (dy.shape[0], dy.shape[1]), dy.dtype, 0)
    return made if row else None, derive_columns(quantizer, made, offs, seeds) if col else None


def _finds_lines(quantizer: Quantizer) -> bool:
    """Whether the column operand needs amaxes of whole lines, and so one more read, but can be decoded at once."""
    side = quantizer.side("col")
    whole = any(buffer.block[0] is None for buffer in side.layout)
    return not whole and any(stat.block[1] is None for stat in side.stats)


def _of(seeds: Tensor | None, tensor: int) -> Tensor | None:
    """The seed of each group, for x, w or dy."""
    return None if seeds is None else seeds[tensor]


def _decoded(plan: Plan, x: Tensor, weight: Tensor) -> tuple[bool, bool, bool]:
    """Whether the operands of fprop, of dgrad and of wgrad are made decoded, in bf16."""
    if not x.is_cuda or not can_call_directly(x):
        return False, False, False
    return _decisions(plan, x.shape[0], tuple(weight.shape), x.device, kernels_allowed())


@registry.cached_few
def _decisions(
    plan: Plan, rows: int, weight: tuple[int, ...], device: torch.device, kernels: object
) -> tuple[bool, bool, bool]:
    x, w, dy = plan.x, plan.w, plan.dy
    if "row" in (x.col_source, w.col_source, dy.col_source):
        return False, False, False
    of_x, of_dy = ([OfProduct(q.side(d), d) for d in DIRECTIONS] for q in (x, dy))
    of_w = [OfProduct(w.side(d), d, stack=True) for d in DIRECTIONS]
    return (
        decoded_at_once(of_x[0], of_w[0], rows, weight, device),
        decoded_at_once(of_dy[0], of_w[1], rows, weight, device),
        decoded_at_once(of_dy[1], of_x[1], rows, weight, device),
    )


def _wrapped(plan: Plan, weight: Tensor, encoded: Buffers) -> tuple[Storage, Storage | None]:
    groups, outputs, features = weight.shape
    row, col = plan.w.side("row"), plan.w.side("col")
    of_row = row.storage.wrap(encoded[0], row, (groups, outputs, features), weight.dtype)
    if not encoded[1]:
        return of_row, None
    return of_row, col.storage.wrap(encoded[1], col, (groups, features, outputs), weight.dtype)
