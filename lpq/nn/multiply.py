"""The three products of a layer, as one function to autograd.

Forward encodes ``x`` and ``w`` in both directions and keeps for backward the two operands that backward multiplies, not
the high-precision input; where a recipe or a compiler chooses so, it keeps a tensor in place of an operand, which
backward makes from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lpq.formats.layout import check_there
from lpq.nn import recomputed
from lpq.nn.cached_weight import Unwritten, turn_of, write_stamp
from lpq.nn.encoded_inputs import SUMMED, Buffers, gradient_given
from lpq.nn.input_checks import check_backward
from lpq.nn.observing import Watch
from lpq.nn.plan import Plan
from lpq.nn.shared_states import EncodedBy
from lpq.nn.siblings import EncodedInput, LastInput, SharedColumn, SharedInputs
from lpq.nn.step import Shapes, Step, bind_few
from lpq.nn.traced_step import through_dispatcher
from lpq.nn.wanted import Accumulate, computes, gradients_needed, refuse_part_of, refuse_parts, sum_in_place
from lpq.operations.binding import on_device
from lpq.operations.encoder import KnownStats
from lpq.operations.group_products import sum_rows
from lpq.operations.operators import can_bypass_dispatcher
from lpq.operations.produced_tiles import Produced
from lpq.operations.random_seeds import with_one_turn
from lpq.operations.states import State
from lpq.tensor import QuantizedTensor
from lpq.torch_private.autograd import keeps_graph, runs_whole
from lpq.torch_private.operators import unsafe_view
from lpq.torch_private.tensors import has_storage


class LayerCall(NamedTuple):
    """The arguments of one pass of a layer beside its tensors."""

    plan: Plan
    shapes: Shapes
    step: Step | None
    """The plan bound to the shapes; None: through the dispatcher."""
    states: Mapping[str, State] = {}
    """The statistics that quantizers remember, by tensor."""
    seeds: Tensor | None = None
    """The seeds of ``x``, ``w`` and ``dy``."""
    weight: Buffers | None = None
    """The buffers of the operands of the weight, if it is encoded already."""
    measured: Sequence[Tensor] = ()
    """The measured statistics of such a weight."""
    accumulate: Accumulate | None = None
    inputs: SharedInputs | LastInput | None = None
    """The inputs that other layers encoded, if this layer's input may be among them. A gradient frees them."""
    static: Sequence[object] = ()
    """The values of the state of the input, if no step moves it and other layers may share it."""
    input: Buffers | None = None
    """The buffers of the operands of the input, if it is encoded already."""
    ends: tuple[Tensor] | tuple[()] = ()
    """Where groups of rows end, if x and dy are divided into groups."""
    layer: int = 0
    """``id(layer)``, by which ``inputs`` find that it runs again."""
    title: str = ""
    """The layer's name in messages; none where a compiler traces, which would compile each layer anew."""
    watch: Watch | None = None
    """The observers of this pass."""
    values: Tensor | None = None
    """The tensor to encode, if ``x`` stands for its gradient and its shape alone."""
    shared: EncodedInput | None = None
    """The input that sharded layers share."""
    shape: Sequence[int] | None = None
    """The shape of the result, if its leading dimensions differ from ``x``."""
    encoded_by: EncodedBy | None = None
    """The layer's own state, if ``input`` was encoded by that."""
    column: SharedColumn | None = None
    """Has the column operand of the input in backward, for all layers that share it."""


class Within(NamedTuple):
    """The tensors of a layer that a function over several layers encodes for it."""

    x: bool
    dy: bool


Source = Callable[[Tensor | None, Sequence[Tensor]], Sequence[Tensor]]
"""``source(dx, kept)``: takes the gradient of an input that it computed, if it is wanted, and returns the buffers of
the column operand of the input, of what its encoder kept."""


class Prepared(NamedTuple):
    """The arguments of a layer in a function over several layers."""

    weight: Tensor
    call: LayerCall
    input: Tensor
    """The tensor to which the gradient of the input goes."""
    bias: Tensor | None
    """The bias that is added with the product."""
    shape: Sequence[int]
    """The shape of the product."""
    finish: Callable[[Tensor], Tensor] | None = None
    """Makes the result of the product, which the layer lays out over ranks."""


class LayerContext:
    """The context of one layer within a function over several layers."""

    call: LayerCall
    counts: tuple[int, int, int, int]
    saved_tensors: Sequence[Tensor] = ()
    """The function gives these to autograd, and backward gets them here again; ``saved``: how many they are."""
    saved: int
    needs_input_grad: tuple[bool, bool, bool]
    next_functions: Sequence[tuple[Any, int]]
    encoded_gradient: object = None
    dy_state: Any = None


class Multiplication(torch.autograd.Function):
    """The three products. A function over several layers calls both methods for each of them, with a ``LayerContext``
    for each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall,
        source: Sequence[Tensor] | None = None, inner: bool = False,
    ) -> Tensor:  # fmt: skip
        """``source``: the tensors of which the input is computed, for an encoder that takes these; ``x`` stands for its
        dimensions. ``inner``: the context is a ``LayerContext``."""
        plan, shapes, step, states, seeds, encoded, w_stats, accumulate, inputs, static, pair, ends, layer, *_ = call
        watch, shared = call.watch, call.shared
        if step is None:
            step = ctx.watched_step = through_dispatcher(plan, shapes)  # a compiler would trace it in backward again
        x_stats: Sequence[Tensor] = ()
        x_encoder: Any = step.x
        own_states: Any = {t: state for t, state in states.items() if t not in shapes.fresh} if shapes.fresh else states
        of_x, of_w = own_states.get("x", ()), own_states.get("w", ())
        given = x if call.values is None else call.values
        values: Any = given if source is None else source
        operands = pair if shared is None else shared.operands
        if pair is not None and shapes.taken:  # the encoder may have to gather it, or to tell groups of it apart
            values, operands = pair, None if shared is None else operands
        if step.exchange is not None:
            stats, seeds = step.exchange((values, weight), seeds)
            of_x, of_w = [KnownStats(s, k) if s else k for s, k in zip(stats, (of_x, of_w), strict=True)]
        x_seed, w_seed, dy_seed = (None, None, None) if seeds is None else seeds.unbind()
        if watch is not None:
            watch.tell("x", given, plan.x, own_states.get("x"), x_seed, ends)
            watch.tell("w", weight, plan.w, own_states.get("w"), w_seed)
        if operands is not None:
            x_row, x_col = operands
        elif isinstance(inputs, SharedInputs):
            x_row, x_col, x_stats = inputs.encode(x_encoder, values, of_x, static, layer)
        else:
            x_row, x_col, x_stats = x_encoder.encode(values, of_x, x_seed, *ends)
        if call.encoded_by is not None:
            x_stats = call.encoded_by.measured
        if encoded is None:
            assert step.w is not None
            w_row, w_col, w_stats = step.w.encode(weight, of_w, w_seed)
        else:
            w_row, w_col = encoded if step.w is None else step.w.encode(encoded, (), w_seed)[:2]
            if call.step is not None and not w_row[0].data_ptr():
                check_there(w_row[0])
        if call.step is None and plan.turns and seeds is not None and not torch.compiler.is_compiling():
            # Selective checkpointing may hand out operands of the first run, and draw seeds anew.
            turn = turn_of(plan.w, (w_row, w_col))
            dy_seed = with_one_turn(seeds, turn_of(plan.x, (x_row, x_col)) if turn is None else turn)[2]
        if operands is None:
            if x_encoder.arrive is not None:
                x_row, x_col = x_encoder.arrive(x_row, x_col)
            if shared is not None:
                shared.operands = x_row, x_col
        y = step.fprop(x_row, w_row, bias)
        if call.watch is not None:
            call.watch.result(y, ends)
        rest: tuple[Tensor, ...] = ends if dy_seed is None else (dy_seed, *ends)
        counts = recomputed.counts_to_save(states) if states else None
        saved = (*x_col, *w_col, *x_stats, *w_stats, *rest, *(() if counts is None else (counts,)))
        if inner:
            ctx.saved_tensors = saved
        else:
            ctx.save_for_backward(*saved)
        ctx.state_counts = None if counts is None else counts.tolist()
        ctx.moves, ctx.dy_state = bool(plan.moving), None
        ctx.x_shape, ctx.counts = x.shape, (len(x_col), len(w_col), len(x_stats), len(w_stats))
        # Not the row operand, which backward does not need.
        ctx.call = call if pair is None and call.values is None else call._replace(input=None, values=None, shared=None)
        if bias is not None:
            ctx.bias = bias.dtype
        # Autograd does not count writes to the buffers of a quantized tensor: they happen inside of operators.
        watched = pair is not None or shapes.taken or isinstance(weight, QuantizedTensor)
        ctx.watched = _as_they_are(given, weight, shapes) if watched and not torch.compiler.is_compiling() else ()
        if accumulate is not None:
            ctx.weight = weight
        if step.refuses is None and (bias is None or not bias.requires_grad):
            ctx.encoded_gradient = plan.dy
        ctx.column = call.column
        if call.column is not None and shapes.needs_dw:
            call.column.users += 1
        shape = call.shape
        if shape is None:
            if x.dim() == 2:
                return y
            shape = (*x.shape[:-1], shapes.outputs)
        # No view to autograd: the output of a module may be changed in place.
        whole: Tensor = unsafe_view(y, shape)
        return whole

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor, dy_operands: Produced | None = None, source: Source | None = None
    ) -> tuple[Tensor | None, ...]:
        """``dy_operands``: the operands of the gradient, of which ``dy`` has the shape. ``source``: what the input was
        computed by."""
        if torch.is_grad_enabled():
            check_backward(dy)
        for record in ctx.watched:
            tensor = record.tensor() if record.tensor is not None else None
            if record.writes.count != record.written or (tensor is not None and write_stamp(tensor) != record.stamp):
                raise record.error()
        call: LayerCall = ctx.call
        plan, shapes, step, inputs, ends, title = call.plan, call.shapes, call.step, call.inputs, call.ends, call.title
        if inputs:
            inputs.clear()
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        if step is None or not runs_whole():
            needs_dx, needs_dw, needs_db = gradients_needed(ctx)
        moves, makes_dx = ctx.moves and (needs_dw or not ctx.needs_input_grad[1]), needs_dx
        if moves:
            needs_dx = ctx.needs_input_grad[0]  # states take the statistics of all operands
        sum_so_far = None
        if needs_dw and call.accumulate is not None and computes(ctx.next_functions[1][0], returned=False):
            sum_so_far = sum_in_place(ctx.weight, call.accumulate)
        summed = shapes.weight if sum_so_far is None else sum_so_far.dtype
        if shapes.needs_dx != needs_dx or shapes.needs_dw != needs_dw or shapes.summed is not summed:
            shapes = shapes._replace(needs_dx=needs_dx, needs_dw=needs_dw, summed=summed)
            step = None if step is None else bind_few(plan, shapes)  # with the same parts, as shapes know these
        first, encoded = dy, None
        if isinstance(dy, QuantizedTensor):
            encoded = dy
            first, shapes = dy.buffers[0], shapes._replace(arrived=True)
            step = None if step is None else bind_few(plan, shapes)
        if step is None and shapes is call.shapes:
            step = ctx.watched_step
        elif step is None or not can_bypass_dispatcher(first):
            step = through_dispatcher(plan, shapes)
        elif not has_storage(first):
            check_backward(dy)
        if encoded is not None:
            why_not = SUMMED if ctx.needs_input_grad[2] else step.refuses
            dy = gradient_given(title, encoded, plan.dy, step.dy, why_not)
        if needs_dx and not makes_dx:
            step = step._replace(dgrad=None)
        if ctx.column is not None and ctx.column.encoder is not None:
            step = step._replace(x=ctx.column.encoder)
        dx = dw = db = None
        saved = ctx.saved_tensors if needs_dx or needs_dw or ends else ()
        if needs_dx or needs_dw:
            with on_device(shapes.device):
                dx, dw = _gradients(ctx, saved, dy, shapes, step, moves, sum_so_far, dy_operands, source)
        if needs_db:
            rows = -1 if shapes.outputs else 0  # there are as many as the rest gives, which 0 columns leave open
            sums = sum_rows(dy, *_ends(ctx, saved)) if ends else dy.reshape(rows, shapes.outputs).sum(0)
            db = sums.to(ctx.bias)
        return dx, dw, db, None


def _ends(ctx: Any, saved: Sequence[Tensor]) -> Sequence[Tensor]:
    """Where groups of rows end, among the saved tensors; nothing where there are no groups."""
    at = sum(ctx.counts) + ctx.call.plan.stochastic
    return saved[at : at + len(ctx.call.ends)]


def _as_they_are(x: Tensor, weight: Tensor, shapes: Shapes) -> list[Unwritten]:
    """The encoded tensors among these that backward needs."""
    records = []
    if shapes.needs_dx and isinstance(weight, QuantizedTensor):
        of = weight.title, weight.shape, weight.writes, weight.writes.count
        records.append(Unwritten("a weight", *of, ref(weight), write_stamp(weight)))
    if shapes.needs_dw and isinstance(x, QuantizedTensor):
        records.append(Unwritten("an input", x.title, x.shape, x.writes, x.writes.count))
    return records


def _gradients(
    ctx: Any, saved: Sequence[Tensor], dy: Tensor, shapes: Shapes, step: Step, moves: bool, sum_so_far: Tensor | None,
    dy_operands: Produced | None, source: Source | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    if ctx.state_counts is not None:
        recomputed.compare(ctx.call.title, ctx.state_counts, saved[-1])
    call: LayerCall = ctx.call
    plan, states = call.plan, call.states
    first, second, third, fourth = itertools.accumulate(ctx.counts)
    seed = saved[fourth] if plan.stochastic else None
    state = states.get("dy") if torch.compiler.is_compiling() or ctx.dy_state is None else ctx.dy_state
    own_state = None if "dy" in shapes.fresh else state
    if call.watch is not None:
        call.watch.tell("dy", dy, plan.dy, own_state, seed, _ends(ctx, saved))
    x_col: Any = saved[:first]
    begin, later = (None, None) if step.x is None or step.wgrad is None else (step.x.begin, step.x.later)
    column = None if begin is None else ctx.column
    if begin is not None:
        x_col = begin(x_col) if column is None else column.begin(begin, x_col)
    dx = dw = None
    if dy_operands is None:
        dy_row, dy_col, dy_stats = step.dy.encode(dy, own_state or (), seed, *(_ends(ctx, saved) if call.ends else ()))
    else:
        dy_row, dy_col, dy_stats, _ = dy_operands
    if step.dy.arrive is not None:
        dy_row, dy_col = step.dy.arrive(dy_row, dy_col)
    if step.dgrad is not None:
        if shapes.encoded and call.step is not None and not saved[first].data_ptr():
            check_there(saved[first])
        w_col = saved[first:second] if step.w is None or step.w.later is None else step.w.later(saved[first:second])
        dx = step.dgrad(dy_row, w_col, None)
    if source is not None and (dx is not None or step.wgrad is not None):
        x_col, dx = source(dx, x_col), None
    if step.wgrad is not None:
        if step.dy.later is not None:
            dy_col = step.dy.later(dy_col)
        if later is not None:
            x_col = later(x_col) if column is None else column.finish(later, x_col)
        dw = step.wgrad(dy_col, x_col, None)
        if sum_so_far is not None:
            sum_so_far.add_(dw)
            dw = None
    if dx is not None:
        if step.finish_dx is not None:
            dx = step.finish_dx(dx)
        if dy.dim() != 2:
            dx = dx.view(ctx.x_shape)
    if not moves:
        return dx, dw
    if torch.compiler.is_compiling():
        refuse_parts(states)
    else:
        if not shapes.needs_dw:
            refuse_part_of(call.title)
        ctx.moves = False
        if "dy" in states and keeps_graph():  # another backward must encode in the same way
            ctx.dy_state = {key: memory.clone() for key, memory in states["dy"].items()}
    x_stats, w_stats = saved[second:third], saved[third:fourth]
    if step.settle is not None:
        x_stats, w_stats, dy_stats = step.settle((x_stats, w_stats, dy_stats))
    measured = {"x": x_stats, "w": w_stats, "dy": dy_stats}
    if call.encoded_by is not None and not call.encoded_by.move(plan.x, x_stats, shapes.needs_dw):
        del measured["x"]
    if fourth == third:  # the weight was encoded before this pass
        del measured["w"]
    assert step.remember is not None
    step.remember(states, measured)
    return dx, dw
