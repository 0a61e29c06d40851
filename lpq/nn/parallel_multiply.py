"""The three products of a layer whose weight tensor parallelism shards, as one function to autograd.

Its arguments are the operands of x and of the weight. Where the contraction is shared out, the output is reduced here.
Where ranks share out the rows of an input, forward has gathered its row operand, and backward gathers its column
operand. Where they share out the rows of an output, backward gathers both operands of its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lpq.distributed.cuts import (
    Cut,
    Gathering,
    Part,
    begin_gather,
    encode_part,
    gather_rows,
    measure_parts,
)
from lpq.formats import Storage
from lpq.nn import recomputed
from lpq.nn.input_checks import check_backward, check_gradient
from lpq.nn.observing import Watch
from lpq.nn.plan import Plan
from lpq.nn.wanted import asked, refuse_part_of, refuse_parts
from lpq.operations import remember
from lpq.operations.binding import Operand, on_device
from lpq.operations.derived_operands import derive_col, derives_col
from lpq.operations.multiplying import gemm
from lpq.operations.operands import State, as_matrix
from lpq.torch_private.autograd import runs_whole
from lpq.torch_private.collectives import all_reduce, arrived, begin_all_reduce, begin_reduce_scatter

Given = tuple[Operand, Sequence[Tensor]]
"""An operand and its buffers."""


class Shared(Protocol):
    """A store of inputs that layers share."""

    def clear(self) -> None:
        """Drop all inputs."""


class Kept:
    """The column operand that siblings have in common, gathered once: it stays as long as one of them needs it."""

    users: int
    col: Storage | None

    def __init__(self) -> None:
        self.users, self.col = 0, None


class Call(NamedTuple):
    """How one pass of a layer is shared out."""

    plan: Plan
    group: str
    """The name of the group of ranks."""
    dtype: torch.dtype
    """The dtype of the result."""
    dy: Part
    gathers_x: Cut | None = None
    """How the ranks share out the rows of x, whose column operand backward gathers."""
    gathers_dy: Cut | None = None
    """How they share out the rows of y and dy: each gets the sum of its own rows of y, and dy is gathered."""
    gathers_high: bool = False
    """Whether dy is gathered before it is encoded."""
    sums_y: bool = False
    """Whether each rank has the sum of all y."""
    sums_dx: bool = False
    """Whether dx is summed over the ranks here: no other layer uses this x, so the sum travels while dw is made."""
    states: Mapping[str, State] = {}
    shared: Kept | None = None
    inputs: Shared | None = None
    """The inputs that are dropped when a gradient comes."""
    title: str = ""
    """The layer's name in messages; none where a compiler traces."""
    watch: Watch | None = None
    """The observers of this pass."""


class Operands(NamedTuple):
    """The tensors that one pass is given."""

    x: Given
    kept: Given | None
    """Backward makes the column operand of x from this; None: it is not needed."""
    w: Given
    w_col: Given | None
    x_stats: Sequence[Tensor] = ()
    w_stats: Sequence[Tensor] = ()
    """The statistics of the whole tensors, where a state remembers them; ``x_stats`` likewise."""
    seed: Tensor | None = None
    """The seed of dy."""
    y: Tensor | None = None
    """The product, if it was made while x arrived; then ``x`` is not multiplied."""


class Multiplication(torch.autograd.Function):
    """The products with this rank's part of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, operands: Operands) -> Tensor:
        """Multiply the operands; ``x`` serves for its gradient and its shape."""
        (of_x, x_row), kept, (of_w, w_row), w_col, x_stats, w_stats, seed, y = operands
        if y is None:
            left, right = of_x.over(x_row), of_w.over(w_row)
            y = gemm(left, right, bias=bias, dtype=call.dtype, fast_accumulate=call.plan.fast[0])
        if call.sums_y:
            y = all_reduce(y, "sum", call.group)
        elif call.gathers_dy is not None:
            (y,) = arrived([_begin_sum(y, call.gathers_dy, call.group)])
        seen = recomputed.seen(call.states) if call.states else None
        saved = (
            kept[1] if kept else (), w_col[1] if w_col else (), x_stats, w_stats,
            () if seed is None else (seed,), () if seen is None else (seen,),
        )  # fmt: skip
        ctx.save_for_backward(*(tensor for tensors in saved for tensor in tensors))
        ctx.moves, ctx.dy_state = bool(call.plan.moving), None
        ctx.counts = [len(tensors) for tensors in saved]
        ctx.seen = None if seen is None else seen.tolist()
        ctx.of_x, ctx.of_w = kept[0] if kept else None, w_col[0] if w_col else None
        ctx.call, ctx.dtypes, ctx.x_shape = call, (x.dtype, weight.dtype, None if bias is None else bias.dtype), x.shape
        if call.shared is not None and kept:
            call.shared.users += 1
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(dy)
        check_gradient(ctx.call.title, dy)
        if ctx.call.inputs is not None:
            ctx.call.inputs.clear()
        needs_dx, needs_dw, needs_db = asked(ctx)
        dx = dw = None
        if needs_dx or needs_dw:
            with on_device(dy.device):
                dx, dw = _gradients(ctx, dy, needs_dx, needs_dw)
        db = dy.sum(0).to(ctx.dtypes[2]) if needs_db else None
        return dx, dw, db, None, None


def _gradients(ctx: Any, dy: Tensor, needs_dx: bool, needs_dw: bool) -> tuple[Tensor | None, Tensor | None]:
    call: Call = ctx.call
    plan, states, group = call.plan, call.states, call.group
    saved, taken = ctx.saved_tensors, []
    for count in ctx.counts:
        taken.append(saved[:count])
        saved = saved[count:]
    kept, w_col, x_stats, w_stats, seed, seen = taken
    if ctx.seen is not None:
        recomputed.compare(call.title, ctx.seen, seen[0])
    static_dx, static_dw = ctx.needs_input_grad[:2]
    moves = ctx.moves and (needs_dw or not static_dw)  # states take the statistics of all operands
    part, cut = call.dy._replace(row=needs_dx or (moves and static_dx), col=needs_dw), call.gathers_dy
    x_arriving = _column_operand_begun(call, ctx.of_x.over(kept)) if needs_dw and call.gathers_x is not None else None
    wanted = part
    if call.gathers_high:
        assert cut is not None
        dy, cut = gather_rows(dy, cut, group), None
    elif cut is not None and derives_col(part.quantizer):
        part = part._replace(row=True, col=False)
    state = states.get("dy") if torch.compiler.is_compiling() or ctx.dy_state is None else ctx.dy_state
    if call.watch is not None:
        call.watch.tell_part("dy", dy, wanted, state, seed[0] if seed else None, group)
    (dy_stats,), _ = measure_parts([(part, dy, state)], None, group)
    encoded = encode_part(part, dy, dy_stats, state, seed[0] if seed else None, group)
    row, col, col_arriving = encoded.row, encoded.col, None
    if cut is not None:  # the row operand first, and while dx is made of it the column operand travels
        row_arriving = begin_gather(row, 0, cut, group) if row is not None else None
        col_arriving = begin_gather(col, 1, cut, group) if col is not None else None
        row = row_arriving.finish() if row_arriving is not None else None
    x_dtype, w_dtype, _ = ctx.dtypes
    dx = dw = None
    if needs_dx:
        assert row is not None
        dx = gemm(row, ctx.of_w.over(w_col), dtype=x_dtype, fast_accumulate=plan.fast[1] is True)
        dx = _begin_sum(dx, call.gathers_x, group) if call.sums_dx else dx
    if needs_dw:
        if col_arriving is not None:
            col = col_arriving.finish()
        elif col is None:
            assert row is not None
            col = derive_col(part.quantizer, row)
        x_col = ctx.of_x.over(kept) if call.gathers_x is None else _column_operand(call, x_arriving)
        dw = gemm(col, x_col, dtype=w_dtype, fast_accumulate=plan.fast[2] is True)
    if dx is not None:
        dx = (arrived([dx])[0] if call.sums_dx else dx).view(ctx.x_shape)
    if moves:
        if torch.compiler.is_compiling():
            refuse_parts(states)
        else:
            if not static_dw:
                refuse_part_of(call.title)
            ctx.moves = False
            if "dy" in states and not runs_whole():  # the other part of this backward is to encode as this one did
                ctx.dy_state = {key: memory.clone() for key, memory in states["dy"].items()}
        if "dy" in states:
            remember(plan.dy, states["dy"], encoded.measured, row=static_dx, col=static_dw)
        if "x" in states:
            remember(plan.x, states["x"], list(x_stats), col=static_dw)
        if "w" in states:
            remember(plan.w, states["w"], list(w_stats), col=static_dx)
    return dx, dw


def _column_operand_begun(call: Call, kept: Storage) -> Gathering | None:
    """Begin to gather the column operand of the whole x, or the row operand that it follows from, before dx is made;
    None if a sibling has it."""
    assert call.gathers_x is not None
    if call.shared is not None and call.shared.col is not None:
        return None
    return begin_gather(kept, 0 if derives_col(call.plan.x) else 1, call.gathers_x, call.group)


def _column_operand(call: Call, arriving: Gathering | None) -> Storage:
    """The column operand of the whole x, gathered once for all siblings."""
    shared = call.shared
    if arriving is not None:
        col = arriving.finish()
        if derives_col(call.plan.x):
            col = derive_col(call.plan.x, col)
    else:
        assert shared is not None
        assert shared.col is not None
        col = shared.col
    if shared is not None:
        shared.users -= 1
        shared.col = col if shared.users > 0 else None
    return col


def _begin_sum(y: Tensor, cut: Cut | None, group: str) -> Tensor:
    """Begin to sum the y of all ranks: all of it, or this rank's rows if there is a cut."""
    if cut is None:
        return begin_all_reduce(y, "sum", group)
    by_rank = y.view(cut.stretches, cut.ranks, cut.size, y.shape[-1]).transpose(0, 1).reshape(y.shape)
    return begin_reduce_scatter(by_rank, cut.ranks, group)


class Spread(torch.autograd.Function):
    """A tensor that ranks use for different parts of a result: the gradients of all are summed.

    Where the ranks share out its rows, the result has the shape of the whole and no values: its gradient is summed, and
    each rank gets its own rows of the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut | None, shape: Sequence[int], group: str) -> Tensor:
        ctx.cut, ctx.shape, ctx.group = cut, x.shape, group
        if cut is None:
            return x.view_as(x)
        return x.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (summed,) = arrived([_begin_sum(grad if ctx.cut is None else as_matrix(grad), ctx.cut, ctx.group)])
        return summed.view(ctx.shape), None, None, None
