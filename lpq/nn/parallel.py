"""A layer under tensor parallelism: its weight is a DTensor, of which each rank of a mesh has some rows or columns.

All follows from how the weight lies on its mesh, and how the input does. Each rank multiplies its own parts; a
statistic that spans parts is reduced over the mesh, so that every code and every scale is that of one process. An input
whose sequence is shared out is encoded before it is gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lpq.distributed.compared import Compared
from lpq.distributed.cuts import Cut, Gathering, Part, begin_gather, encode_part, measure_parts, why_high
from lpq.distributed.overlapped import can_overlap, multiply_arriving
from lpq.formats import Storage
from lpq.nn import recomputed
from lpq.nn.input_checks import check_parallel, check_parallel_input
from lpq.nn.observing import Watch, watch
from lpq.nn.parallel_multiply import Call, Given, Kept, Multiplication, Operands, Spread
from lpq.operations.binding import Operand, on_device
from lpq.operations.derived_operands import derives_col
from lpq.operations.operands import State, as_matrix
from lpq.operations.operators import ORDINARY
from lpq.operations.random_seeds import draw_seeds
from lpq.recipes.gemms import TENSORS
from lpq.torch_private import cuda
from lpq.torch_private.tensors import local_part, version_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lpq.nn.plan import Plan
    from lpq.nn.saved import Saved
    from lpq.nn.siblings import Inputs

_multiply: Any = Multiplication.apply
_spread: Any = Spread.apply


class _Input(NamedTuple):
    """The input of a layer, encoded."""

    tensor: Tensor
    """The tensor through which its gradient goes back: the input, if no other layer can share it. Else it sums the
    gradients over the ranks, and has the shape of the whole where the input was gathered."""
    row: Given
    kept: Given | None
    stats: list[Tensor]
    shared: Kept | None


class SharedInput:
    """The input that layers of a model gathered or encoded last, for layers that get the same tensor next. Only one is
    kept, so that all ranks find it or none does. The next input replaces it, and the first gradient frees it.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._as_it_was: tuple[object, ...] = ()
        self._made: _Input | None = None
        self._by: set[int] = set()
        """The layers that have had it. One that asks again is in another pass, before which the tensor may have been
        written to by other means than autograd counts."""

    def find(self, x: Tensor, how: tuple[object, ...], layer: int) -> _Input | None:
        """The encoded input that was made of this very tensor in this way, if the tensor has not changed since."""
        found = self._of is not None and self._of() is x and self._as_it_was == _as_it_is(x, how)
        if not found or layer in self._by:
            return None
        self._by.add(layer)
        return self._made

    def keep(self, x: Tensor, how: tuple[object, ...], made: _Input, layer: int) -> None:
        """Keep an encoded input until its tensor dies, or another one is kept."""
        self._of, self._as_it_was, self._made = weakref.ref(x, self._forget), _as_it_is(x, how), made
        self._by = {layer}

    def clear(self) -> None:
        self._of, self._made = None, None

    def _forget(self, of: weakref.ref[Tensor]) -> None:
        if self._of is of:
            self.clear()


def _as_it_is(x: Tensor, how: tuple[object, ...]) -> tuple[object, ...]:
    return (None if x.is_inference() else version_of(x), x.data_ptr(), torch.is_grad_enabled(), *how)


class _Pass(NamedTuple):
    """One pass of a layer over the ranks of its mesh."""

    layer: Saved
    plan: Plan
    mesh: DeviceMesh
    group: str
    rank: int
    ranks: int
    dtype: torch.dtype
    needs_dx: bool
    needs_dw: bool
    states: Mapping[str, State]
    inputs: Inputs | None
    static: Sequence[float]
    """The values of the state of x, which no step moves; ranks and layers that share an input have the same ones."""

    @property
    def title(self) -> str:
        """The layer's name in messages; none where a compiler traces, which would compile each layer anew."""
        return "" if torch.compiler.is_compiling() else self.layer.title

    def part(self, tensor: str, cut: Cut | None) -> Part:
        """How x, w or dy is encoded."""
        row, col = {"x": (True, self.needs_dw), "w": (True, self.needs_dx), "dy": (self.needs_dx, self.needs_dw)}[
            tensor
        ]
        return Part(getattr(self.plan, tensor), row, col, cut)

    def equally(self, dim: int, whole: int) -> Cut:
        """Rows (0) or columns (1) of a matrix, so many for each rank."""
        return Cut(dim, self.rank, self.ranks, whole // self.ranks)

    def overlaps(self, cut: Cut, x: Tensor) -> bool:
        """Whether an input whose rows ranks share out is multiplied as its parts arrive."""
        return self.layer.layouts is not None and self.layer.layouts.overlap and can_overlap(cut, x)

    def sequence(self, shape: Sequence[int], dim: int) -> Cut:
        """The rows of a tensor of this shape, of which each rank has some along a leading dimension."""
        size = shape[dim] // self.ranks * prod(shape[dim + 1 : -1])
        return Cut(0, self.rank, self.ranks, size, prod(shape[:dim]))


def multiply_parts(
    layer: Saved, plan: Plan, input: Tensor, weight: DTensor, bias: Tensor | None, dtype: torch.dtype,
    states: Mapping[str, State], inputs: Inputs | None, static: Sequence[float],
) -> DTensor:  # fmt: skip
    """Return the output of a layer, over the mesh of its weight; ``inputs``: those that layers of the model share, if
    this one may, with the ``static`` values of its own."""
    _compare_ranks(layer, input, weight)
    check_parallel(layer, input, weight)
    mesh, grad = weight.device_mesh, torch.is_grad_enabled()
    way = _Pass(
        layer, plan, mesh, mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), dtype,
        grad and input.requires_grad, grad and weight.requires_grad,
        {name: {key: local_part(t) for key, t in state.items()} for name, state in states.items()}, inputs, static,
    )  # fmt: skip
    if states:
        recomputed.check(layer, way.states)
    given: Placement = Replicate() if layer.layouts is None else layer.layouts.input
    given = input.placements[0] if isinstance(input, DTensor) else given
    return (_columns if weight.placements[0].is_shard(0) else _rows)(way, input, given, weight, bias)


def _compare_ranks(layer: Saved, input: Tensor, weight: DTensor) -> None:
    """Raise on all ranks of the mesh unless they have the same model and equal parts of the input. A compiled pass does
    not compare: nothing may wait inside of it."""
    local = local_part(input)
    runs = type(local) in ORDINARY and not local.is_meta and not torch.compiler.is_compiling()
    if runs and weight.device_mesh.ndim == 1:
        if layer.compared is None:  # it was not converted, or is a copy
            layer.compared = Compared(layer)
        layer.compared.before_pass(layer, input, weight.device_mesh, weight.requires_grad)


def _columns(way: _Pass, input: Tensor, given: Placement, weight: DTensor, bias: Tensor | None) -> DTensor:
    """Multiply the whole input by this rank's rows of the weight; the result is those columns of the output."""
    layer = way.layer
    of_w = way.part("w", way.equally(0, layer.out_features))
    of_dy = way.part("dy", way.equally(1, layer.out_features))
    _refuse_cut_blocks(layer, {"its weight": of_w, "the gradient of its output": of_dy})
    dim = given.dim % input.dim() if isinstance(given, Shard) else input.dim()
    cut = _gathered_encoded(way, input, dim) if dim < input.dim() - 1 else None
    x, key = _local(way, input, given, given if cut is not None else Replicate(), 1)
    shape = [*x.shape]
    if cut is not None:
        shape[dim] *= way.ranks
    of_x = way.part("x", cut)
    shared = _shared(way, x)
    how = () if shared is None else (way.group, of_x, *way.static, x.requires_grad, _stream(x))
    made = None if shared is None else shared.find(key, how, id(layer))
    own, y = bias.to_local() if isinstance(bias, DTensor) else bias, None
    overlaps = made is None and cut is not None and way.overlaps(cut, x)
    with torch.no_grad(), on_device(x.device):
        x_stats, w_stats, seeds = _measured(way, of_w, weight, None if made is not None else _sent(of_x), x)
        watched = _watched(way, of_x, x, of_w, weight, seeds) if layer.observers else None
        encoded = None if made is not None else _encoded_input(way, of_x, x, x_stats, seeds.get("x"), not overlaps)
        w_row, w_col, w_stats = _encoded_weight(way, of_w, weight, w_stats, seeds)  # while the input travels
        row = None if encoded is None else encoded.finish()
        if overlaps and row is not None and cut is not None:
            of_row, buffers = w_row
            y, row = multiply_arriving(
                row, of_row.over(buffers), own, way.dtype, way.plan.fast[0], cut, way.group, shared is not None
            )
    if encoded is not None:
        assert row is not None
        spread = x if shared is None else _spread(x, cut, shape, way.group)
        kind = Kept() if shared is not None and cut is not None else None
        made = _Input(spread, _given(row), encoded.kept, encoded.stats, kind)
        if shared is not None:
            shared.keep(key, how, made, id(layer))
    assert made is not None
    call = Call(
        way.plan, way.group, way.dtype, of_dy, cut, sums_dx=shared is None, states=way.states, shared=made.shared,
        inputs=shared, title=way.title, watch=watched,
    )  # fmt: skip
    operands = Operands(made.row, made.kept, w_row, w_col, made.stats, w_stats, seeds.get("dy"), y)
    y = _multiply(made.tensor, weight.to_local(), own, call, operands)
    y = y.view(*shape[:-1], y.shape[-1])
    return DTensor.from_local(y, way.mesh, [Shard(y.dim() - 1)], run_check=False)


def _rows(way: _Pass, input: Tensor, given: Placement, weight: DTensor, bias: Tensor | None) -> DTensor:
    """Multiply this rank's columns of the input by its columns of the weight; the output is the sum over the ranks."""
    layer, last = way.layer, input.dim() - 1
    of_w = way.part("w", way.equally(1, layer.in_features))
    of_x = way.part("x", way.equally(1, layer.in_features))
    _refuse_cut_blocks(layer, {"its weight": of_w, "its input": of_x})
    inner = isinstance(given, Shard) and given.dim % input.dim() == last
    x, _ = _local(way, input, given, given if inner else Shard(last), way.ranks)
    wanted = layer.layouts.output if layer.layouts is not None else None
    shape, cut, into = [*x.shape[:-1], layer.out_features], None, wanted
    dim = wanted.dim % len(shape) if isinstance(wanted, Shard) else last
    if dim < last and not shape[dim] % way.ranks:
        cut, into = way.sequence(shape, dim), Shard(dim)
        shape[dim] //= way.ranks
    elif (bias is None and not (wanted is not None and wanted.is_replicate())) or isinstance(wanted, Partial):
        into = Partial()
    else:
        into = Replicate()
    of_dy = way.part("dy", cut)
    rows = x.numel() // x.shape[-1]
    high = cut is not None and why_high(of_dy, rows, layer.out_features, way.dtype) is not None
    if high:
        of_dy = of_dy._replace(cut=None)
    with torch.no_grad(), on_device(x.device):
        x_stats, w_stats, seeds = _measured(way, of_w, weight, of_x, x)
        watched = _watched(way, of_x, x, of_w, weight, seeds) if layer.observers else None
        w_row, w_col, w_stats = _encoded_weight(way, of_w, weight, w_stats, seeds)
        encoded = _encoded_input(way, of_x, x, x_stats, seeds.get("x"))
    call = Call(
        way.plan, way.group, way.dtype, of_dy, None, cut, high, into.is_replicate(), states=way.states,
        title=way.title, watch=watched,
    )  # fmt: skip
    operands = Operands(_given(encoded.finish()), encoded.kept, w_row, w_col, encoded.stats, w_stats, seeds.get("dy"))
    y: Tensor = _multiply(x, weight.to_local(), None, call, operands).view(shape)
    if bias is not None:  # once, and not on each rank before they are summed
        own = bias.to_local() if isinstance(bias, DTensor) else bias
        if into.is_partial() and way.rank:
            own = own - own.detach()  # zero, and its gradient is that of the bias
        y = y + (own if cut is None else _spread(own, None, own.shape, way.group)).to(y.dtype)
    return DTensor.from_local(y, way.mesh, [into], run_check=False)


def _watched(way: _Pass, of_x: Part, x: Tensor, of_w: Part, weight: DTensor, seeds: Mapping[str, Tensor]) -> Watch:
    """The observers of the pass, which are told of its input and its weight."""
    watched = watch(way.layer)
    watched.tell_part("x", x, of_x, way.states.get("x"), seeds.get("x"), way.group)
    watched.tell_part("w", local_part(weight), of_w, way.states.get("w"), seeds.get("w"), way.group)
    return watched


# ---------------------------------------------------------------------------------------------- the input


def _local(way: _Pass, input: Tensor, given: Placement, wanted: Placement, parts: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the input, with one of so many ``parts`` of its features, laid out for the product; and the
    tensor by which siblings find it."""
    key = input
    if not isinstance(input, DTensor) and given != wanted:
        input = DTensor.from_local(input, way.mesh, [given], run_check=False)
    if isinstance(input, DTensor):
        if given != wanted:
            input = input.redistribute(placements=[wanted])
        input, key = input.to_local(), local_part(input)
    check_parallel_input(way.layer, input, parts)
    return input, key


def _gathered_encoded(way: _Pass, input: Tensor, dim: int) -> Cut | None:
    """How the ranks share out the rows of an input whose parts are gathered encoded; None if they are gathered in high
    precision. It follows from sizes and layouts, so all ranks decide alike."""
    shape = [*input.shape]
    if not isinstance(input, DTensor):
        shape[dim] *= way.ranks
    if shape[dim] % way.ranks:
        return None
    cut = way.sequence(shape, dim)
    of_x, rows = way.part("x", cut), prod(shape[:-1])
    one_by_one = (of_x._replace(col=False), of_x._replace(row=False))
    whys = [why_high(part, rows, shape[-1], input.dtype) for part in one_by_one if part.row or part.col]
    return cut if all(why is None for why in whys) else None


def _sent(part: Part) -> Part:
    """The part with the operands to encode: the row operand alone, if it is gathered and the other follows from it."""
    gathered = part.cut is not None and part.cut.dim == 0
    return part._replace(row=True, col=False) if gathered and derives_col(part.quantizer) else part


class _Encoded(NamedTuple):
    """An input, encoded; its row operand may be on its way."""

    row: Storage
    """The row operand, of this rank's part where ranks share out the rows."""
    arriving: Gathering | None
    """The gather of the whole row operand, if it was begun."""
    kept: Given | None
    """The operand of the input that backward needs."""
    stats: list[Tensor]
    """The statistics that were measured."""

    def finish(self) -> Storage:
        """The row operand, gathered if that was begun."""
        return self.row if self.arriving is None else self.arriving.finish()


def _encoded_input(
    way: _Pass, part: Part, x: Tensor, stats: list[Tensor], seed: Tensor | None, gather: bool = True
) -> _Encoded:
    """Encode an input, and begin to ``gather`` its row operand if the ranks share out its rows."""
    row, col, stats = encode_part(_sent(part), as_matrix(x), stats, way.states.get("x"), seed, way.group)
    assert row is not None
    kept = None if not part.col else _given(row if col is None else col)
    begun = None
    if gather and part.cut is not None and part.cut.dim == 0:
        begun = begin_gather(row, 0, part.cut, way.group)
    return _Encoded(row, begun, kept, stats)


def _shared(way: _Pass, x: Tensor) -> SharedInput | None:
    """The place where layers of the model share their input; None if this one may not."""
    inputs = way.inputs
    if inputs is None or type(x) not in ORDINARY or x.is_meta:
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a graph that is replayed must encode what is new
    if inputs.whole is None:
        inputs.whole = SharedInput()
    assert isinstance(inputs.whole, SharedInput)
    return inputs.whole


def _stream(x: Tensor) -> int:
    return cuda.current_stream(x.get_device()) if x.is_cuda else 0


# ---------------------------------------------------------------------------------------------- the weight


def _measured(
    way: _Pass, of_w: Part, weight: DTensor, of_x: Part | None, x: Tensor
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """The statistics of the input, unless its part is None, those of the weight, and the seeds of the pass, with one
    reduction over the ranks for all of them. In a graph the input has one of its own: a compiler merges those of layers
    that are given the same input, and so all that follows from it, the gather included."""
    w = local_part(weight)
    parts = [] if of_x is None else [(of_x, as_matrix(x), way.states.get("x"))]
    alone = measure_parts(parts, None, way.group)[0] if torch.compiler.is_compiling() else []
    seeds = draw_seeds(x, w, len(TENSORS)) if way.plan.stochastic else None
    rest = [*([] if alone else parts), (of_w, w, way.states.get("w"))]
    stats, seeds = measure_parts(rest, seeds, way.group)
    named = {} if seeds is None else dict(zip(TENSORS, seeds.unbind(), strict=True))
    of_input = alone or stats[:-1]
    return of_input[0] if of_input else [], stats[-1], named


def _encoded_weight(
    way: _Pass, part: Part, weight: DTensor, stats: list[Tensor], seeds: Mapping[str, Tensor]
) -> tuple[Given, Given | None, list[Tensor]]:
    """The operands of this rank's part of the weight, and what was measured."""
    state, seed = way.states.get("w"), seeds.get("w")
    row, col, stats = encode_part(part, local_part(weight), stats, state, seed, way.group)
    assert row is not None
    return _given(row), None if col is None else _given(col), stats


def _given(storage: Storage) -> Given:
    rows, cols = storage.shape
    return Operand(storage.quantizer, (rows, cols), storage.dtype), storage.tensors()


def _refuse_cut_blocks(layer: Saved, parts: Mapping[str, Part]) -> None:
    """Refuse parts of an operand if the ranks' shares of a dimension cut blocks that must stay whole."""
    for what, part in parts.items():
        assert part.cut is not None
        reason = part.cut.why_not(part.quantizer, part.row, part.col)
        if reason is not None:
            raise ValueError(
                f"{layer.title}: {what} cannot be shared out over {part.cut.ranks} ranks: {reason}. Use fewer ranks, "
                "give the layer a recipe with smaller blocks, or leave it out of the plan"
            )
