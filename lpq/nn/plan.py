"""The plan of a layer for its tensors: decided for a recipe, and bound to the shapes of a step. A ``Plan`` belongs to a
recipe. A ``Step`` is a plan bound to inputs of one shape on one device: three encoders and three products, so that a
layer decides nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lpq import registry
from lpq.emulation.bf16_gemm import multiplied_exactly
from lpq.formats.format import Quantizer
from lpq.nn.quantizer_state import Memory, memories
from lpq.operations.binding import Multiply, Product
from lpq.operations.bound import (
    Encoder,
    Wanted,
    bind_encoder,
    bind_product,
    in_two_steps,
    operands_of,
    product_through_operators,
    through_operators,
)
from lpq.operations.compiled_calls import spare_the_dispatcher
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.operands import Moving, State, bind_remember

if TYPE_CHECKING:
    from lpq.recipes import Recipe

Pair = tuple[Quantizer, Quantizer]
"""The quantizers of the two operands of a product."""


@dataclass(frozen=True)
class Plan:
    """The decisions of a recipe on the three tensors of a layer and their products."""

    x: Quantizer
    w: Quantizer
    dy: Quantizer
    fast: tuple[bool, bool, bool]
    """For fprop, dgrad and wgrad: whether a kernel may sum in less than fp32."""
    stochastic: bool
    """Whether anything is rounded with random bits."""
    memories: tuple[Memory, ...]
    """The buffers in which quantizers remember."""
    moving: tuple[str, ...]
    """The tensors that have buffers which a step changes."""
    shares: bool
    """Whether all layers with the same static values encode an input alike, and encoding it is not free."""
    keeps_input: bool
    """Whether the input is kept for backward, which makes its column operand; ``keeps_weight`` likewise."""
    keeps_weight: bool
    fprop: Pair | None = None
    """The operands' quantizers, if one operand can be made without being encoded; dgrad and wgrad likewise."""
    dgrad: Pair | None = None
    wgrad: Pair | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """The plan of a recipe. Gradients are summed exactly unless the recipe allows less."""
        fast = (recipe.fprop.fast_accumulate, recipe.dgrad.fast_accumulate, recipe.wgrad.fast_accumulate)
        tensors = (recipe.x, recipe.w, recipe.dy)
        stochastic = any(map(rounds_stochastically, tensors))
        of = [product if any(map(_made_exactly, product)) else None for product in recipe.products.values()]
        fast_sums = (fast[0] is not False, fast[1] is True, fast[2] is True)
        kept, row, col = memories(recipe), recipe.x.side("row"), recipe.x.side("col")
        own = rounds_stochastically(recipe.x) or any(memory.tensor == "x" and memory.moves for memory in kept)
        shares, keeps = not own and not (row.plain and col.plain), (recipe.save_x == "input", recipe.save_w == "weight")
        moving = tuple(dict.fromkeys(memory.tensor for memory in kept if memory.moves))
        return cls(*tensors, fast_sums, stochastic, kept, moving, shares, *keeps, *of)

    def __post_init__(self) -> None:
        for quantizer in (self.x, self.w, self.dy):
            quantizer.ready()


def _made_exactly(side: Quantizer) -> bool:
    """Whether the format has kernels, for any hardware, that make an operand for a product without encoding it."""
    return bool(registry.kernels("exact_tile", (registry.format_of(type(side)).name,)))


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
    kernels: object = None
    """The value of ``LPQ_KERNELS`` under which kernels are chosen."""
    compiled: bool = False
    """Whether a compiler traces this step, and decides what is kept for backward."""


class Step(NamedTuple):
    """A plan bound to shapes."""

    x: Encoder | None
    """None: the input is encoded already; ``w`` likewise."""
    w: Encoder | None
    dy: Encoder
    fprop: Multiply
    dgrad: Multiply | None
    """None: that gradient is not wanted."""
    wgrad: Multiply | None
    remember: Callable[[Mapping[str, State], Mapping[str, Sequence[Tensor]]], None] | None = None
    """Moves the states of all tensors by the measured statistics; None: each is moved by itself, or there are none."""


def bind(plan: Plan, shapes: Shapes) -> Step:
    """Decide now all that a step of these shapes does."""
    step = _step(plan, shapes, bind_encoder, bind_product, exact=True)
    if not plan.moving:
        return step
    dx, dw = shapes.needs_dx, shapes.needs_dw
    every = Moving("x", plan.x, True, dw), Moving("w", plan.w, True, dx), Moving("dy", plan.dy, dx, dw)
    moving = [m for m in every if m.tensor in plan.moving]
    return step._replace(remember=bind_remember(moving, shapes.device))


bind_few = registry.cached_few(bind)
"""``bind`` for all layers of a model that have the same plan and shapes."""


def through_dispatcher(plan: Plan, shapes: Shapes) -> Step:
    """Bind by operators, for tracers and dispatch modes. Under all but a compiler every operand is encoded."""
    exact = torch.compiler.is_dynamo_compiling()
    if exact:
        spare_the_dispatcher()
    return _step(plan, shapes, through_operators, product_through_operators, exact=exact)


def _step(
    plan: Plan,
    shapes: Shapes,
    encoder: Callable[[Wanted], Encoder],
    product: Callable[[Product], Multiply],
    *,
    exact: bool,
) -> Step:
    rows, features, outputs, x_dtype, w_dtype, dtype, summed, device, needs_dx, needs_dw, encoded, given, _, later = (
        shapes
    )
    states, later = [memory.tensor for memory in plan.memories], shapes.compiled
    fprop, dgrad, wgrad = (exact and multiplied_exactly(p, device) for p in (plan.fprop, plan.dgrad, plan.wgrad))
    forward = (fprop, False)
    draws = not encoded and not plan.w.side("row").plain
    of_x = Wanted(plan.x, (rows, features), x_dtype, device, True, needs_dw, "x" in states, forward, later, not draws)
    x = None if given else _encoder(encoder, of_x, plan.keeps_input)
    wanted = Wanted(plan.w, (outputs, features), w_dtype, device, True, needs_dx, "w" in states, forward, later, draws)
    wanted = wanted._replace(at_hand=True)
    w = None if encoded else _encoder(encoder, wanted, plan.keeps_weight)
    also = needs_dx and dgrad, needs_dw and wgrad
    dy = encoder(Wanted(plan.dy, (rows, outputs), dtype, device, needs_dx, needs_dw, "dy" in states, also))
    x_row, x_col = operands_of(of_x) if x is None else (x.row, x.col)
    w_row, w_col = operands_of(wanted) if w is None else (w.row, w.col)
    assert x_row is not None
    assert w_row is not None
    multiply, into_dx, into_dw = product(Product(x_row, w_row, dtype, device, plan.fast[0])), None, None
    if dy.row is not None and w_col is not None:
        into_dx = product(Product(dy.row, w_col, x_dtype, device, plan.fast[1]))
    if dy.col is not None and x_col is not None:
        into_dw = product(Product(dy.col, x_col, summed, device, plan.fast[2]))
    return Step(x, w, dy, multiply, into_dx, into_dw)


def _encoder(encoder: Callable[[Wanted], Encoder], wanted: Wanted, keeps: bool) -> Encoder:
    """The encoder of the input or the weight; ``keeps``: the tensor is kept for backward, not its column operand.

    A compiler decides that by itself, and would copy in backward the state that forward is to copy.
    """
    return in_two_steps(encoder, wanted) if keeps and wanted.col and not wanted.later else encoder(wanted)
