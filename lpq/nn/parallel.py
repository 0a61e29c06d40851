"""A layer under tensor parallelism: its weight is a DTensor, of which each rank of a mesh has some rows or columns.
Everything follows from the placements of the weight and of the input. A pass is a plain layer's pass over this rank's
parts (``SharedOut``), with the placements of its input and its output. An input whose sequence is divided over ranks is
encoded before it is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lpq.distributed.model_check import ModelCheck
from lpq.distributed.overlapped import can_overlap
from lpq.distributed.part_gathers import begin_sum
from lpq.distributed.shardability import why_high
from lpq.kernels.table import kernels_allowed
from lpq.nn.encoded_inputs import describe_encoding, input_buffers
from lpq.nn.input_checks import check_parallel, check_parallel_input, check_static
from lpq.nn.multiply import LayerCall, Multiplication, Prepared, Within
from lpq.nn.observing import watch
from lpq.nn.parallel_step import SharedOut, why_not_by_itself
from lpq.nn.plan import Plan
from lpq.nn.shared_states import EncodedBy
from lpq.nn.siblings import EncodedInput, LastInput, SharedColumn
from lpq.nn.step import Shapes, bind_few
from lpq.nn.weighted_layer import WeightedLayer
from lpq.operations.binding import on_device
from lpq.operations.cut import Cut
from lpq.operations.inputs import as_matrix
from lpq.operations.operators import ORDINARY, can_bypass_dispatcher
from lpq.tensor import QuantizedTensor
from lpq.tensor.with_value import WithValue
from lpq.torch_private import cuda
from lpq.torch_private.collectives import finish
from lpq.torch_private.tensors import local_part

_multiply: Any = Multiplication.apply


class SumGradients(torch.autograd.Function):
    """A tensor that ranks use for different parts of a result: the gradients of all are summed.

    Where its rows are divided over the ranks, or it is encoded, the result has the global shape and no values: its
    gradient is summed, and each rank gets its own rows of the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut | None, shape: Sequence[int], group: str) -> Tensor:
        ctx.cut, ctx.shape, ctx.group = cut, x.shape, group
        if cut is None and not isinstance(x, QuantizedTensor):
            return x.view_as(x)
        return torch.zeros((), dtype=x.dtype, device=x.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = finish(begin_sum(grad if ctx.cut is None else as_matrix(grad), ctx.cut, ctx.group))
        return total.view(ctx.shape), None, None, None


_sum_gradients: Any = SumGradients.apply


class Siblings(NamedTuple):
    """How layers with the same input share its encoding."""

    inputs: LastInput
    first: LayerCall
    """The call of the first layer, which encodes."""
    others: LayerCall
    how: tuple[object, ...]
    """The properties on which the operands depend, beside the values of a static state."""


class MeshPass(NamedTuple):
    """How passes of one kind go over the mesh of the weight."""

    mesh: DeviceMesh
    source: Placement
    """How the input lies over the ranks."""
    target: Placement
    """How it is to lie for the product."""
    whole: tuple[int, ...]
    """The shape of the input where it is gathered."""
    parts: SharedOut
    output: Placement
    result: tuple[int, ...]
    """The shape of this rank's part of the output."""
    call: LayerCall
    siblings: Siblings | None = None
    """How siblings share the input; None: they do not."""


def multiply_parts(
    layer: WeightedLayer, plan: Plan, input: Tensor, weight: DTensor, bias: Tensor | None, dtype: torch.dtype,
    complete: Callable[[LayerCall, Tensor, Tensor], LayerCall], within: Within | None = None,
) -> DTensor | Prepared | None:  # fmt: skip
    """Return the output of a layer, over the mesh of its weight. ``complete`` adds to a call the values that are new in
    each pass. ``within``: as for ``Layer.forward``."""
    _compare_ranks(layer, input, weight, dtype, within is not None)
    grad, w, local, over = torch.is_grad_enabled(), weight.to_local(), local_part(input), None
    by = EncodedBy.over_ranks(layer, input) if isinstance(local, QuantizedTensor) else None
    if isinstance(local, WithValue) and by is None:
        input = input.expand(input.shape)  # the value, which autograd knows
        local = local_part(input)
    needs, compiling = (grad and input.requires_grad, grad and weight.requires_grad), torch.compiler.is_compiling()
    if compiling:
        layer.note_pass(traced=True, shared=True)
    else:
        try:
            key = (
                input.shape, input.dtype, input.layout, input.device, type(input), getattr(input, "placements", None),
                weight.shape, weight.placements, weight.device_mesh, type(w), w.dtype, w.device,
                None if bias is None else bias.requires_grad, dtype,
                needs, layer.layouts, layer.model.accumulate, kernels_allowed(), type(local),
                can_bypass_dispatcher(local), layer.passes.fresh, within,
                None if by is None else by.over,
            )  # fmt: skip
        except RuntimeError:  # it has no shape
            check_parallel(layer, input, weight)
            raise
        passes = layer.passes.bound_calls()
        over = passes.get(key)
    if over is not None:
        x, found_by = _laid_out(over.mesh, input, over.source, over.target)
    else:
        over, x, found_by = _mesh_pass(layer, plan, input, weight, w, bias, dtype, needs, by.over if by else None)
        if not compiling:
            passes[key] = over
    if within is not None and over.call.step is None:
        return None
    sequence, group, by_columns = over.parts.sequence, over.parts.group, over.parts.weight.dim == 0
    own = bias.to_local() if isinstance(bias, DTensor) else bias
    call, siblings, through, shared, first = over.call, over.siblings, x, None, False
    if siblings is not None and (
        # Nobody counts writes to the one, and a replayed graph must encode the new values of the other.
        found_by.is_inference() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        siblings = None
    if siblings is not None:
        stream = cuda.current_stream(x.get_device()) if x.is_cuda else 0
        static = layer.passes.static_input.read(layer.states()["x"]) if "x" in plan.remembered else ()
        how = *siblings.how, *static, x.requires_grad, stream
        shared, call = siblings.inputs.find(found_by, how, id(layer)), siblings.others
        first = shared is None
        if shared is None:
            through = _sum_gradients(x, sequence, over.whole, group) if needs[0] else x
            shared, call = EncodedInput(through, SharedColumn()), siblings.first
        through = shared.tensor
    if plan.memories or plan.stochastic or call.shapes.encoded:
        call = complete(call, x, w)
    if siblings is not None and shared is not None:
        call = call._replace(values=x.detach(), shared=shared, column=shared.column, inputs=siblings.inputs)
    if isinstance(x, QuantizedTensor):
        if isinstance(x, WithValue) and x.beside:
            call = call._replace(values=x.encoded_as(plan.x))
        if by is None:
            call = call._replace(input=input_buffers(layer, plan, x, needs[1]))
        elif by.state:
            call = call._replace(encoded_by=by)
            by.take(layer)
    if layer.passes.observers:
        call = call._replace(watch=watch(layer)._replace(parts=over.parts))
    own_bias = own if by_columns else None
    if within is None:
        with on_device(x.device):
            y: Tensor = _multiply(through, w, own_bias, call)
    if siblings is not None and shared is not None and first:
        siblings.inputs.keep(found_by, how, shared, id(layer))
    if within is not None:
        return Prepared(w, call, through, own_bias, over.result, partial(_finished, over, None if by_columns else own))
    if own is not None and not by_columns:
        return _finished(over, own, y)
    return DTensor.from_local(y, over.mesh, [over.output], run_check=False)


def _finished(over: MeshPass, bias: Tensor | None, y: Tensor) -> DTensor:
    """Make the output of a product, and add a bias once, and not on each rank before they are summed."""
    if bias is not None:
        if over.output.is_partial() and over.parts.weight.rank:
            bias = bias - bias.detach()  # zero, with the gradient of the bias
        sequence, group = over.parts.sequence, over.parts.group
        y = y + (bias if sequence is None else _sum_gradients(bias, None, bias.shape, group)).to(y.dtype)
    return DTensor.from_local(y, over.mesh, [over.output], run_check=False)


def _compare_ranks(layer: WeightedLayer, input: Tensor, weight: DTensor, dtype: torch.dtype, joined: bool) -> None:
    """Raise on all ranks of the mesh unless they have the same model and equal parts of the input, which each can take.
    A compiled pass does not compare: nothing may wait inside of it."""
    if torch.compiler.is_compiling() or weight.device_mesh.ndim != 1:
        return
    local, encoding = local_part(input), None
    if isinstance(local, QuantizedTensor):
        encoding, local = describe_encoding(local), local.buffers[0]
    if isinstance(local, Tensor) and not local.is_nested and (type(local) not in ORDINARY or weight.is_meta):
        return  # nothing runs: it stands for a tensor
    if (check := layer.model.check) is None:  # it was not converted, or is a copy: another model than the others
        check = ModelCheck(layer)
        layer.model = replace(layer.model, check=check)
    check.before_pass(layer, input, weight, dtype, check_parallel, encoding, joined)


def _laid_out(mesh: DeviceMesh, input: Tensor, source: Placement, target: Placement) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the input, laid out for the product; and the tensor by which siblings find the encoded
    input."""
    if not isinstance(input, DTensor):
        if source is target:
            return input, input
        input = DTensor.from_local(input, mesh, [source], run_check=False)
    if source is not target:
        input = input.redistribute(placements=[target])
    return input.to_local(), local_part(input)


# ---------------------------------------------------------------------------------------------- a pass of a new kind


def _mesh_pass(
    layer: WeightedLayer, plan: Plan, input: Tensor, weight: DTensor, w: Tensor, bias: Tensor | None,
    dtype: torch.dtype, needs: tuple[bool, bool], encoded_over: tuple[str, Cut | None] | None,
) -> tuple[MeshPass, Tensor, Tensor]:  # fmt: skip
    """Decide how passes of this kind go; return this rank's part of the input and the tensor that siblings find as
    well. ``encoded_over``: as ``EncodedBy.over``. All ranks decide alike, by sizes and placements."""
    check_parallel(layer, input, weight)
    mesh, compiling = weight.device_mesh, torch.compiler.is_compiling()
    if not compiling:
        layer.note_pass(traced=False)
        check_static(layer, layer.title)
    source: Placement = Replicate() if layer.layouts is None else layer.layouts.input
    source = input.placements[0] if isinstance(input, DTensor) else source
    group, rank, ranks = mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()
    columns, encoded = weight.placements[0].is_shard(0), isinstance(local_part(input), QuantizedTensor)
    size = layer.out_features if columns else layer.in_features
    cut, last = Cut(0 if columns else 1, rank, ranks, size // ranks), input.dim() - 1
    dx, dw = needs
    by = {
        "its weight": cut.why_not(plan.w, True, dx),
        "the gradient of its output": cut._replace(dim=1).why_not(plan.dy, dx, dw) if columns else None,
        "its input": None if columns else cut.why_not(plan.x, True, dw),
    }
    refuse_cut_blocks(layer, ranks, by)
    sequence, rows, high = None, None, False
    output: Placement = Shard(last)
    if columns:
        sizes = [*input.shape]
        dim = source.dim % input.dim() if isinstance(source, Shard) else input.dim()
        if not isinstance(input, DTensor) and dim < last:
            sizes[dim] *= ranks
        rows = gathered_rows(plan, sizes, dim, rank, ranks, dw, input.dtype)
        sequence = rows if isinstance(rows, Cut) else None
        into: Placement = Replicate() if sequence is None else source
    else:
        into = Shard(last)
    of_features = isinstance(source, Shard) and source.dim % input.dim() == last
    into = source if source == into or (not columns and of_features) else into
    whole_here = columns and source.is_replicate()
    over_these = columns and encoded_over == (group, sequence) and whole_here == (sequence is None)
    if encoded and not (over_these or (whole_here and encoded_over is None)):
        if into is source and encoded_over is None and not isinstance(rows, str):
            why = why_not_by_itself(plan.x, sequence if columns else cut, row=True, col=dw)
        elif isinstance(rows, str):
            why = f"its parts are gathered in high precision: {rows}"
        else:
            why = f"it lies over the ranks as {source}, and the layer multiplies {into}"
        if why is not None:
            raise ValueError(
                f"{layer.title}: its input is encoded already, and {why}. Pass the tensor before it is encoded"
            )
    x, found_by = _laid_out(mesh, input, source, into)
    check_parallel_input(layer, x, 1 if columns else ranks)
    whole = [*x.shape]
    if sequence is not None:
        whole[dim] *= ranks
    result = [*whole[:-1], w.shape[0]]
    if not columns:
        sequence, output = _sum(layer, result, bias is not None, rank, ranks)
        high = (
            sequence is not None
            and why_high(plan.dy, *needs, sequence, prod(result[:-1]), result[-1], dtype) is not None
        )
        if sequence is not None:
            result[output.dim] //= ranks  # type: ignore[attr-defined]
    overlap = columns and sequence is not None and layer.layouts is not None and layer.layouts.overlap
    overlaps = overlap and sequence is not None and can_overlap(sequence, x)
    ordinary_part = x.buffers[0] if isinstance(x, QuantizedTensor) else x
    gathered = isinstance(w, QuantizedTensor)
    bypasses = can_bypass_dispatcher(ordinary_part) and (gathered or type(w) in ORDINARY)
    sums, adds_bias = columns or not output.is_partial(), not columns and bias is not None and bias.requires_grad
    parts = SharedOut(group, cut, sequence, high, sums, overlaps, adds_bias=adds_bias)
    shapes = Shapes(
        prod(x.shape[:-1]), x.shape[-1], w.shape[0], x.dtype, w.dtype, dtype, w.dtype, x.device, dx, dw, gathered,
        compiled=torch.compiler.is_dynamo_compiling(), taken=encoded, fresh=layer.passes.fresh, parts=parts,
    )  # fmt: skip
    title, shape = "" if compiling else layer.title, tuple(result) if len(result) != 2 else None

    def call(shapes: Shapes) -> LayerCall:
        with on_device(x.device):
            step = bind_few(plan, shapes) if bypasses else None
        return LayerCall(plan, shapes, step, layer=id(layer), title=title, shape=shape)

    siblings, inputs = None, layer.model.inputs
    ordinary = encoded or (type(x) in ORDINARY and not x.is_meta)
    if columns and plan.shares and inputs is not None and ordinary and not compiling:
        if inputs.whole is None:
            inputs.whole = LastInput()
        first = shapes._replace(parts=parts._replace(sums=False, keeps=True))
        calls = call(first), call(first._replace(given=True))
        siblings = Siblings(inputs.whole, *calls, (group, plan.x, dw, sequence))
    over = MeshPass(mesh, source, into, tuple(whole), parts, output, tuple(result), call(shapes), siblings)
    return over, x, found_by


def _sequence(shape: Sequence[int], dim: int, rank: int, ranks: int) -> Cut:
    """The rows of a tensor of this shape, which are divided over ranks along a leading dimension."""
    return Cut(0, rank, ranks, shape[dim] // ranks * prod(shape[dim + 1 : -1]), prod(shape[:dim]))


def gathered_rows(
    plan: Plan, sizes: Sequence[int], dim: int, rank: int, ranks: int, dw: bool, dtype: torch.dtype
) -> Cut | str | None:
    """How the rows of an input of these global sizes are divided, which has its dimension ``dim`` over the ranks and is
    gathered encoded; the reason why it is gathered in high precision; None: it is not divided by rows."""
    if dim >= len(sizes) - 1:
        return None
    if sizes[dim] % ranks:
        return f"the {sizes[dim]} parts of its input along dimension {dim} are uneven over {ranks} ranks"
    cut, rows = _sequence(sizes, dim, rank, ranks), prod(sizes[:-1])
    directions = [(True, False), (False, True)] if dw else [(True, False)]
    reasons = (why_high(plan.x, *one, cut, rows, sizes[-1], dtype) for one in directions)
    return next((reason for reason in reasons if reason is not None), cut)


def _sum(layer: WeightedLayer, shape: Sequence[int], bias: bool, rank: int, ranks: int) -> tuple[Cut | None, Placement]:
    """How ranks get the sum of their outputs: each some of its rows, each all of it, or not yet."""
    layout, last = layer.layouts.output if layer.layouts is not None else None, len(shape) - 1
    dim = layout.dim % len(shape) if isinstance(layout, Shard) else last
    if dim < last and not shape[dim] % ranks:
        return _sequence(shape, dim, rank, ranks), Shard(dim)
    if (not bias and not (layout is not None and layout.is_replicate())) or isinstance(layout, Partial):
        return None, Partial()
    return None, Replicate()


def refuse_cut_blocks(
    layer: WeightedLayer, ranks: int, reasons: dict[str, str | None], error: type[Exception] = ValueError
) -> None:
    """Refuse parts of an operand if the ranks' shares of a dimension cut blocks that must stay whole."""
    for what, reason in reasons.items():
        if reason is not None:
            raise error(
                f"{layer.title}: {what} cannot be divided over {ranks} ranks: {reason}. Use fewer ranks, "
                "give the layer a recipe with smaller blocks, or leave it out of the plan"
            )
