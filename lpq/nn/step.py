"""A step of a layer: a plan bound to inputs of one shape on one device. It is three encoders and three products, so
that a layer decides nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lpq.emulation.bf16_gemm import multiplied_exactly
from lpq.kernels.table import bound_once
from lpq.nn.encoded_inputs import of_given, why_no_gradient
from lpq.nn.plan import Plan
from lpq.operations.binding import Multiply, Operand, Product
from lpq.operations.bound import bind_product
from lpq.operations.encoder import (
    BindEncoder,
    Encoder,
    EncoderSpec,
    bind_encoder,
    in_two_steps,
    of_delivered,
    operands_of,
    through_operators,
)
from lpq.operations.multiplying import product_through_operators
from lpq.operations.states import Moving, Remember, bind_remember

BindProduct = Callable[[Product], Multiply]
Operands = tuple[Operand | None, Operand | None]
"""The row operand and the column operand of a tensor."""

Exchange = Callable[[Sequence[Tensor], Tensor | None], tuple[Sequence[list[Tensor]], Tensor | None]]
"""``exchange((x, w), seeds)``: the statistics of x and of w, none where none are exchanged, and the seeds that all
ranks have."""


class Parts(Protocol):
    """How ``x``, ``w`` and ``dy`` are divided over ranks or into groups. The object is hashable, as a step is bound to
    it: bound anew, for other gradients or by operators, the step has the same parts."""

    def step(self, plan: Plan, shapes: Shapes, encoder: BindEncoder, product: BindProduct) -> Step:
        """Bind a step by these functions."""

    def named(self, *, sized: bool) -> tuple[Any, ...]:
        """The import string of a function and its arguments, plain values, of which it makes these parts. Not
        ``sized``: for tensors of any size, whose steps have the same functions; no value is a compiler's symbol."""


class Shapes(NamedTuple):
    """The properties of a pass that a step is bound to."""

    rows: int
    features: int
    """The input is a matrix ``[rows, features]``."""
    outputs: int
    x: torch.dtype
    weight: torch.dtype
    dtype: torch.dtype
    """The dtype of the result."""
    summed: torch.dtype
    """The dtype of the gradient of the weight."""
    device: torch.device
    needs_dx: bool
    needs_dw: bool
    encoded: bool
    """Whether the operands of the weight are given, so that none is encoded."""
    given: bool = False
    """Whether the operands of the input are given."""
    compiled: bool = False
    """Whether a compiler traces this step, and decides which tensors are kept for backward."""
    taken: bool = False
    """Whether the input, or this rank's part of it, is encoded already: the encoder, which may gather it or make column
    operands of groups, is given its operands."""
    watched: bool = False
    """Whether a tracer or a mode watches, so that operators encode and multiply."""
    arrived: bool = False
    """Whether the gradient of the result arrives encoded."""
    fresh: tuple[str, ...] = ()
    """The tensors that have states, and are measured in place of them."""
    parts: Parts | None = None
    """How ``x``, ``w`` and ``dy`` are divided over ranks or into groups; None: each is one whole matrix."""


class Step(NamedTuple):
    """A plan bound to shapes.

    A product takes the buffers that encoders return. Buffers that travel between ranks arrive in the product that needs
    them.
    """

    x: Encoder | None
    """None: the input is encoded already; ``w`` likewise, unless its column operand is made at use."""
    w: Encoder | None
    dy: Encoder
    fprop: Multiply
    dgrad: Multiply | None
    """None: that gradient is not wanted."""
    wgrad: Multiply | None
    refuses: str | None
    """Why the gradient of the result may not arrive encoded; None: it may."""
    exchange: Exchange | None = None
    """Measures x and w and reduces their statistics over ranks, together, before they are encoded; None: encoders
    measure for themselves."""
    settle: Callable[[Sequence[Sequence[Tensor]]], Sequence[Sequence[Tensor]]] | None = None
    """Reduces the measured statistics of x, w and dy, in this order, over ranks, before states remember them; None:
    they are reduced already, or cover the whole."""
    finish_dx: Callable[[Tensor], Tensor] | None = None
    """Waits for the dx that ``dgrad`` began to sum; None: it is there."""
    remember: Remember | None = None
    """Moves the states of the tensors that were measured; None: no step moves one."""


def bind(plan: Plan, shapes: Shapes) -> Step:
    """Make all decisions for steps of these shapes."""
    step = step_of(plan, shapes, bind_encoder, bind_product, exact=True)
    return _with_memory(step, plan, shapes, shapes.device)


bind_few = bound_once(bind)
"""``bind`` for all layers of a model that have the same plan and shapes."""


def by_operators(plan: Plan, shapes: Shapes, *, compiled: bool) -> Step:
    """Bind by operators, for tracers and dispatch modes. Under all but a compiler every operand is encoded."""
    shapes = shapes._replace(watched=True)
    step = step_of(plan, shapes, through_operators, product_through_operators, exact=compiled)
    return _with_memory(step, plan, shapes, None)


def _with_memory(step: Step, plan: Plan, shapes: Shapes, device: torch.device | None) -> Step:
    if not plan.moving:
        return step
    dx, dw = shapes.needs_dx, shapes.needs_dw
    every = Moving("x", plan.x, True, dw), Moving("w", plan.w, True, dx), Moving("dy", plan.dy, dx, dw)
    return step._replace(remember=bind_remember([m for m in every if m.tensor in plan.moving], device))


def step_of(plan: Plan, shapes: Shapes, encoder: BindEncoder, product: BindProduct, *, exact: bool = False) -> Step:
    """Bind a step by these functions; ``exact``: operands may be made in their exact forms."""
    if shapes.parts is not None:
        return shapes.parts.step(plan, shapes, encoder, product)
    device, needs_dx, needs_dw = shapes.device, shapes.needs_dx, shapes.needs_dw
    later = shapes.compiled
    fprop, dgrad, wgrad = (exact and multiplied_exactly(p, device) for p in (plan.fprop, plan.dgrad, plan.wgrad))
    forward = (fprop, False)
    draws = not shapes.encoded and not plan.w.side("row").plain
    of_x = input_spec(plan, shapes)._replace(exact=forward, later=later, always_takes_seed=not draws)
    of_w = weight_spec(plan, shapes)._replace(exact=forward, later=later, always_takes_seed=draws)
    of_dy = gradient_spec(plan, shapes)._replace(exact=(needs_dx and dgrad, needs_dw and wgrad))
    keeps = plan.keeps_input, plan.keeps_weight
    return bind_step(plan, shapes, (of_x, of_w, of_dy), keeps, encoder, product, why_no_gradient(plan))


def bind_step(
    plan: Plan, shapes: Shapes, specs: tuple[EncoderSpec, EncoderSpec, EncoderSpec], keeps: tuple[bool, bool],
    encoder: BindEncoder, product: BindProduct, refuses: str | None,
) -> Step:  # fmt: skip
    """Bind, by these functions, the encoders of x, w and dy, which are whole matrices or sections, and the products of
    their operands. ``keeps``: whether the input, and the weight, is kept for backward, which makes its column operand.
    """
    of_x, of_w, of_dy = specs
    w: Encoder | None
    if shapes.given:
        x = None
    else:
        x = of_delivered(encoder, of_x) if shapes.taken else _encoder(encoder, of_x, keeps[0])
    if shapes.encoded:
        w = of_delivered(encoder, of_w) if plan.w_at_use else None
    else:
        w = _encoder(encoder, of_w, keeps[1])
    if shapes.arrived:  # the column operand of all rows is none of a group
        dy = of_given(of_dy) if of_dy.sections is None else of_delivered(encoder, of_dy)
    else:
        dy = encoder(of_dy)
    known_x = operands_of(of_x) if x is None else (x.row, x.col)
    known_w = operands_of(of_w) if w is None else (w.row, w.col)
    products = bind_products(plan, shapes, known_x, known_w, (dy.row, dy.col), product)
    return Step(x, w, dy, *products, refuses)


def bind_products(
    plan: Plan, shapes: Shapes, x: Operands, w: Operands, dy: Operands, product: BindProduct,
    fprop: BindProduct | None = None,
) -> tuple[Multiply, Multiply | None, Multiply | None]:  # fmt: skip
    """Bind fprop, dgrad and wgrad by ``product``, each of the operands that it multiplies. ``fprop``: binds the first
    otherwise. A gradient is None if it has no operand."""
    (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = x, w, dy
    assert x_row is not None
    assert w_row is not None
    device, fast, into_dx, into_dw = shapes.device, plan.fast, None, None
    multiply = (fprop or product)(Product(x_row, w_row, shapes.dtype, device, fast[0]))
    if dy_row is not None and w_col is not None:
        into_dx = product(Product(dy_row, w_col, shapes.x, device, fast[1]))
    if dy_col is not None and x_col is not None:
        into_dw = product(Product(dy_col, x_col, shapes.summed, device, fast[2]))
    return multiply, into_dx, into_dw


def input_spec(plan: Plan, shapes: Shapes) -> EncoderSpec:
    """How the input of a layer is encoded, not in exact forms."""
    spec = EncoderSpec(plan.x, (shapes.rows, shapes.features), shapes.x, shapes.device, True, shapes.needs_dw)
    return _by_state(spec, "x", plan, shapes)


def weight_spec(plan: Plan, shapes: Shapes) -> EncoderSpec:
    """How the weight of a layer is encoded, not in exact forms."""
    matrix, needs_dx = (shapes.outputs, shapes.features), shapes.needs_dx
    spec = EncoderSpec(plan.w, matrix, shapes.weight, shapes.device, True, needs_dx, at_hand=True)
    return _by_state(spec, "w", plan, shapes)


def gradient_spec(plan: Plan, shapes: Shapes) -> EncoderSpec:
    """How the gradient of the result of a layer is encoded, not in exact forms."""
    matrix, directions = (shapes.rows, shapes.outputs), (shapes.needs_dx, shapes.needs_dw)
    return _by_state(EncoderSpec(plan.dy, matrix, shapes.dtype, shapes.device, *directions), "dy", plan, shapes)


def _by_state(spec: EncoderSpec, tensor: str, plan: Plan, shapes: Shapes) -> EncoderSpec:
    """The same encoding by the state of a tensor, if it has one, or by what is measured for a fresh state."""
    spec = spec._replace(compiled=shapes.compiled)
    if tensor in shapes.fresh:
        return spec._replace(measures=True)
    return spec._replace(remembers=True) if tensor in plan.remembered else spec


def _encoder(encoder: BindEncoder, spec: EncoderSpec, keeps: bool) -> Encoder:
    """The encoder of the input or the weight; ``keeps``: the tensor is kept for backward, not its column operand.

    A compiler decides that by itself: it would copy in backward the state that forward should copy.
    """
    return in_two_steps(encoder, spec) if keeps and spec.col and not spec.later else encoder(spec)
