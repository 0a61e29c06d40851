"""The three products of a grouped layer as one autograd function. Each group's rows meet the matrix of their group.

fprop  y = x.row · w.row        dgrad  dx = dy.row · w.col        wgrad  dw = dy.col · x.col
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import check_there
from lpq.nn.accumulation import Accumulate, is_summed, sum_in_place
from lpq.nn.cached_weight import as_it_is, written_since
from lpq.nn.encoded_inputs import Buffers
from lpq.nn.grouped_step import Shapes, Step, bind, bind_few
from lpq.nn.input_checks import check_backward, check_gradient
from lpq.nn.plan import Plan
from lpq.nn.wanted import asked
from lpq.operations.binding import on_device
from lpq.operations.group_products import sum_rows
from lpq.operations.operands import State
from lpq.operations.operators import can_bypass_dispatcher
from lpq.tensor import QuantizedTensor


class GroupedCall(NamedTuple):
    """The arguments of one pass of a grouped layer beside its tensors."""

    plan: Plan
    shapes: Shapes
    step: Step | None
    """The plan bound to the shapes; None: through the dispatcher."""
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
        plan, shapes, step, encoded, accumulate, given, states, _ = call
        if step is None:
            step = bind(plan, shapes)
        x_seeds, w_seeds, dy_seeds = (None, None, None) if seeds is None else seeds.unbind()
        x_row, x_kept, _ = step.x.encode(x if given is None else given, states.get("x"), x_seeds, offs)
        if step.w is not None:
            w_row, w_kept, _ = step.w.encode(weight, states.get("w"), w_seeds, offs)
        else:
            assert encoded is not None
            w_row, w_kept = encoded
            if not torch.compiler.is_compiling():
                check_there(w_row[0])
        y = step.fprop(x_row, w_row, bias)
        ctx.save_for_backward(offs, *(() if dy_seeds is None else (dy_seeds,)), *x_kept, *w_kept)
        ctx.call, ctx.count, ctx.decided = call, len(x_kept), step.decided
        ctx.bias = None if bias is None else bias.dtype
        watched = isinstance(weight, QuantizedTensor) and shapes.needs_dx and not torch.compiler.is_compiling()
        ctx.watched = (weight, as_it_is(weight)) if watched else None
        ctx.weight = weight if accumulate is not None else None
        sums = bias is not None and bias.requires_grad  # of the gradients in high precision
        ctx.encoded_gradient = None if sums else step.takes
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan, shapes, step, _, accumulate, _, states, title = ctx.call
        check_backward(dy)
        check_gradient(title, dy, ctx.encoded_gradient)
        if ctx.watched is not None and as_it_is(ctx.watched[0]) != ctx.watched[1]:
            raise written_since(ctx.watched[0], "a weight")
        offs, *saved = ctx.saved_tensors
        seeds, saved = (saved[0], saved[1:]) if plan.stochastic else (None, saved)  # torch 2.11 traces it as a tuple
        needs_dx, needs_dw, needs_db = asked(ctx)
        into = None
        if needs_dw and ctx.weight is not None and is_summed(ctx.next_functions[1][0]):
            into = sum_in_place(ctx.weight, accumulate)
        summed, arrived = shapes.weight if into is None else into.dtype, isinstance(dy, QuantizedTensor)
        watched = not arrived and not can_bypass_dispatcher(dy)
        if step is None or watched or arrived:
            forward = None if step is None else ctx.decided
            step = bind(plan, shapes._replace(
                needs_dx=needs_dx, needs_dw=needs_dw, summed=summed, watched=watched, arrived=arrived, forward=forward
            ))  # fmt: skip
        elif shapes.needs_dx != needs_dx or shapes.needs_dw != needs_dw or shapes.summed is not summed:
            step = bind_few(plan, shapes._replace(needs_dx=needs_dx, needs_dw=needs_dw, summed=summed))
        dx = dw = db = None
        if needs_dx or needs_dw:
            with on_device(shapes.device):
                how = dy.operand("row").tensors() if isinstance(dy, QuantizedTensor) else dy
                dy_row, dy_col, _ = step.dy.encode(how, states.get("dy"), seeds, offs)
                if step.dgrad is not None:
                    w_col = (
                        saved[ctx.count :]
                        if step.w is None or step.w.later is None
                        else step.w.later(saved[ctx.count :])
                    )
                    if step.w is None and not torch.compiler.is_compiling():
                        check_there(w_col[0])
                    dx = step.dgrad(dy_row, w_col, None)
                if step.wgrad is not None:
                    x_col = saved[: ctx.count] if step.x.later is None else step.x.later(saved[: ctx.count])
                    dy_col = dy_col if step.dy.later is None else step.dy.later(dy_col)
                    dw = step.wgrad(dy_col, x_col, None)
                    if into is not None:
                        into.add_(dw)
                        dw = None
        if needs_db:
            db = sum_rows(dy, offs).to(ctx.bias)
        return dx, dw, db, None, None, None
