"""Norms that hand the next layers encoded operands: the input of q, k and v, or of gate and up, is encoded once, by the
norm.

The layers to which a norm hands its output are its ``consumers``. The norm returns a quantized tensor, encoded as their
recipes encode it. Layers that encode an input alike are a group, which has one encoding: what rows have in common is
found once, and the output is computed and encoded once for each group. Other code that takes the output gets it in high
precision, from the same run, and so does a layer that encodes each input by itself. Results and gradients equal the
results of the norm and the layers apart to the bit, with two exceptions: kernels on a GPU add in an order of their own,
and in fp32 autograd gets the gradient of the input in one piece. Where a hook or an observer looks at the input of a
layer, the norm computes as its class does, and ``why_not`` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lpq import registry
from lpq.kernels.table import kernels_allowed
from lpq.nn.linear import Layer
from lpq.nn.norm_groups import (
    ELSEWHERE,
    HOOKED,
    REPLACED,
    REPLACED_BEHIND,
    BeforeLayers,
    ConsumerGroup,
    encode_alone,
    groups_of,
    why_another,
)
from lpq.nn.plan import Plan
from lpq.nn.recomputed_norms import ColumnOfNorm, column_encoder, inputs_of_column, value_of
from lpq.nn.shared_states import EncodedBy, local_state, shared_state
from lpq.nn.stand_ins import Read, changed
from lpq.operations.binding import Operand, on_device
from lpq.operations.encoder import Encoder, EncoderSpec, Stats, bind_encoder, one_by_one
from lpq.operations.inputs import DTYPES, as_matrix
from lpq.operations.norm_choice import norm_kernels_of
from lpq.operations.norm_kernels import Gradients
from lpq.operations.norms import NormKind, norm_source
from lpq.operations.operators import ORDINARY, can_bypass_dispatcher
from lpq.operations.part_encoders import bind_part
from lpq.operations.produced_tiles import Produced, aligned
from lpq.operations.producer import Output, Producer, bind_producer, kernels_of, why_apart
from lpq.tensor.with_value import WithValue
from lpq.torch_private.compiling import once_when_traced
from lpq.torch_private.dispatch import autocasts
from lpq.torch_private.hooks import hooks_before, hooks_behind, may_see_input, others_hang
from lpq.torch_private.operators import unsafe_view
from lpq.torch_private.tensors import local_part, version_of

if TYPE_CHECKING:
    from lpq.nn.parallel_norms import DividedNorm

Encode = Callable[
    [Tensor, Tensor | None, Sequence[Tensor], Sequence[Sequence[Layer]]], tuple[Tensor, Tensor, Sequence[Tensor]]
]
"""``encode(x, residual, (weight, bias), layers)``: the output of a norm, encoded for the layers of each group, if there
is one, its input, which is ``x`` or the sum of both, and what a kernel found of the rows."""
MOST_CALLS = 8
"""The number of bound calls that a norm keeps, one for each kind of pass."""
NO_CONSUMERS = "it knows no layer that takes its output"
WATCHED = "a compiler, a dispatch mode or a transform watches it, or its input is no ordinary tensor"
AUTOCAST = "autocast is on"
NO_WEIGHT = "its weight is no ordinary parameter"


class EncodingNorm(BeforeLayers):
    """A norm that encodes its output for the layers that take it.

    It extends a class of modules with a ``weight``, and perhaps a ``bias``, over the last dimension: derive a subclass
    of this and of that class, or have ``adopt`` do so. It has the parameters and the state-dict keys of that class.
    """

    @property
    def norm(self) -> NormKind:
        """How that class computes."""
        raise NotImplementedError

    lpq_reads: tuple[Read, ...] = ()
    """The attributes by which the other class computes ``norm``."""
    lpq_traced: bool = False
    """Whether a compiler has traced a pass of the norm, in which it encodes nothing."""
    _calls: dict[object, _Call]
    """The bound calls by the kind of a pass; under ``None``, the call of the last pass."""

    def forward(self, *args: Any, residual: Tensor | None = None, with_sum: bool = False, **others: Any) -> Any:
        """Take and return what the other base class does, or with a ``residual`` the norm of ``x + residual`` and that
        sum.

        Args:
            *args: ``x``, and further arguments of the other class.
            residual: The residual stream, to which ``x`` is added in the kernel that finds what rows have in common.
            with_sum: Return the sum also where there is no residual. It is ``x`` then. In backward the gradients by the
                output and by the sum are added in the kernel of the norm.
            **others: Further arguments of the other class.
        """
        if autocasts() and self.consumers and len(args) == 1 and not others and self._is_high(*args, residual):
            with torch.autocast(args[0].device.type, enabled=False):  # which has no part in it
                return self.forward(*args, residual=residual, with_sum=with_sum, **others)
        with_sum = with_sum or residual is not None
        bound = None
        if torch.compiler.is_compiling():
            self._note_traced()
        elif self.consumers and len(args) == 1 and not others:
            if residual is not None and not _adds(*args, residual):
                args, residual = (args[0] + residual,), None
            call = self._call(*args, adds=residual is not None)
            bound, self._calls[None] = call.bound, call
            for layer in self.consumers:
                if layer.passes.fresh:  # it measures its own inputs
                    bound = None
            if with_sum and bound is not None and bound.over is not None and type(args[0]) not in ORDINARY:
                bound = None  # a style lays out one output
        if bound is None:
            if residual is not None:
                args = args[0] + residual, *args[1:]
            y = super().forward(*args, **others)  # of the other base class
            return (y, args[0]) if with_sum else y
        (x,), over = args, bound.over
        weight: Tensor | None = self._parameters["weight"]
        bias: Tensor | None = self._parameters.get("bias")
        layers, whole = [[self.consumers[i] for i in group.at] for group in bound.groups], x
        if over is not None:
            from lpq.nn.parallel_norms import laid_out, local_parts

            x, weight, bias = local_parts(over, x, weight, bias)
        with on_device(x.device):
            y = EncodedNorm.apply(x, weight, bias, bound, layers, residual, with_sum)  # type: ignore[no-untyped-call]
        return y if over is None else laid_out(over, whole, y)

    @once_when_traced
    def _note_traced(self) -> bool:
        self.lpq_traced = True
        return True

    def _is_high(self, x: Any, residual: Tensor | None) -> bool:
        """Whether autocast is on for a norm of ``x``, or of its sum with a residual, which is in fp32 as the parameters
        are: it computes the same without autocast then."""
        tensors = (x,) if residual is None else (x, residual)
        if torch.compiler.is_compiling() or any(type(t) not in ORDINARY for t in tensors):
            return False
        parameters = self._parameters.values()
        return (
            torch.is_autocast_enabled(x.device.type)
            and any(t.dtype is torch.float32 for t in tensors)
            and all(p.dtype is torch.float32 for p in parameters if p is not None)
        )

    def why_not(self, x: Tensor, gathered: Collection[nn.Module] = ()) -> str | None:
        """Why the output for this input is an ordinary tensor, which the layers encode themselves; None if the norm
        encodes it. ``gathered``: modules whose parameters FSDP2 makes ordinary tensors for a pass."""
        return self._call(x, gathered).why_not

    @property
    def why_unfit(self) -> str | None:
        """Why it did not encode its output for the input of the last pass, whatever the layers are. Nobody can tell
        before a pass."""
        last = vars(self).get("_calls", {}).get(None)
        return last.why_not if last is not None and last.of_input else None

    def _call(self, x: Tensor, gathered: Collection[nn.Module] = (), adds: bool = False) -> _Call:
        if not self.consumers:
            return _Call(NO_CONSUMERS)
        calls: dict[object, _Call] = self.__dict__.setdefault("_calls", {})
        if "forward" in vars(self):
            return _Call(REPLACED)
        block = self.places[0][0][0] if self.places else None
        if block is not None and self not in block._modules.values() and not self.in_block():
            return _Call(ELSEWHERE)
        if hooks_behind(self) and others_hang(self, hooks_behind):
            return _Call(HOOKED)
        if self.lpq_reads and (name := changed(self.lpq_reads)) is not None:
            return _Call(f"its {name} was set since: call lpq.fuse again")
        trained, plans, own, shared, over = list[bool](), [], self._parameters.get("weight"), False, list[object]()
        if not can_bypass_dispatcher(x if type(x) in ORDINARY else local_part(x)):
            return _Call(AUTOCAST, of_input=True) if autocasts() else _Call(WATCHED)
        for place, layer in zip(self.places, self.consumers, strict=False):
            for module, name, child in place:
                now = module._modules.get(name)
                if now is not child and (why := why_another(now, child)) is not None:
                    return _Call(why)
                if "forward" in vars(child):
                    return _Call(REPLACED_BEHIND)
                if child is not layer and (hooks_before(child) or hooks_behind(child)) and may_see_input(child):
                    return _Call(HOOKED)
        alone = encode_alone(self.places, self.consumers) if self.places or self.lpq_traced else ()
        for layer in self.consumers:
            weight = layer._parameters.get("weight")
            if layer.layouts is not None or (hasattr(weight, "device_mesh") and layer not in gathered):
                shared = True
                over += [layer.layouts, getattr(weight, "device_mesh", None), getattr(weight, "placements", None)]
            if (hooks_before(layer) or hooks_behind(layer)) and others_hang(layer, hooks_before, hooks_behind):
                return _Call(f"{layer.title} has a forward hook, which looks at its input")
            if layer.passes.observers:
                return _Call(f"{layer.title} has an observer, which is told of its input")
            trained.append(weight is None or weight.requires_grad)
            if layer in alone:
                layer.own_buffers()  # here, as compiled code would do so in a graph of its own
            plans.append(None if layer in alone else layer.passes.plan)
        if own is None or (type(own) not in ORDINARY and self not in gathered and not shared):
            return _Call(NO_WEIGHT)
        if not torch.is_grad_enabled():
            trained = [False] * len(trained)
        key = (
            x.shape, x.dtype, x.device, own.dtype, vars(self).get("eps"), *trained, adds, kernels_allowed(),
            registry.epoch(), *map(id, plans),
        )  # fmt: skip
        if shared:
            key = (*key, getattr(x, "placements", None), getattr(own, "placements", None), *over)
        call = calls.get(key)
        if call is None:
            if len(calls) >= MOST_CALLS:
                calls.clear()
            call = calls[key] = self._bound(x, plans, trained, adds, shared)
        return call

    def _bound(
        self, x: Tensor, plans: Sequence[Plan | None], trained: Sequence[bool], adds: bool, shared: bool
    ) -> _Call:
        """Bind the passes of one kind. ``trained``: for each layer whether backward needs the gradient of its weight;
        ``shared``: ranks share out layers."""
        groups, unfit = groups_of(plans, trained), self._why_unfit(x)
        why_not = unfit or (None if groups else self._why_no_group(plans))
        if unfit is not None or (not groups and (shared or not encode_alone(self.places, self.consumers))):
            return _Call(why_not, tuple(plans), of_input=unfit is not None)
        biased, taken = self._parameters.get("bias") is not None, [i for group in groups for i in group.at]
        others = self.serves_others or len(taken) < len(plans)
        if not shared:
            return _Call(why_not, tuple(plans), bind_norm(self.norm, groups, x, biased, others, adds))
        from lpq.nn.parallel_norms import over_ranks  # which imports torch.distributed

        layers = [self.consumers[i] for i in taken]
        over = over_ranks(x, self, layers, [(group.plan, group.col) for group in groups])
        if not isinstance(over, str) and over.cut is not None and others:
            over = "ranks have parts of its output, and something takes it in high precision, too"
        if isinstance(over, str):
            return _Call(over, tuple(plans))
        return _Call(None, tuple(plans), bind_norm(self.norm, groups, local_part(x), biased, others, adds, over))

    def _why_no_group(self, plans: Sequence[Plan | None]) -> str:
        """Why no layer with these plans takes an encoded input."""
        for layer in encode_alone(self.places, self.consumers):
            return f"{layer.title} is compiled and remembers statistics of inputs, and so encodes each by itself"
        for layer, plan in zip(self.consumers, plans, strict=True):
            if plan is not None:
                return f"{layer.title} makes of each input an encoding of its own, or none, with x={plan.x}"
        return "the layers that take its output have no recipe"

    def _why_unfit(self, x: Tensor) -> str | None:
        """Why no output for such an input is encoded, whatever the layers are."""
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        if x.dtype not in DTYPES or any(p.dtype is not x.dtype for p in (weight, bias) if p is not None):
            return f"its input is {x.dtype} and its weight {weight.dtype}"
        if weight.dim() != 1 or not x.dim() or x.shape[-1] != weight.shape[0]:
            return f"its input is {list(x.shape)} and its weight {list(weight.shape)}"
        return None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {key: value for key, value in state.items() if key != "_calls"}


class RMSNorm(EncodingNorm, nn.RMSNorm):
    """``nn.RMSNorm`` that encodes its output for its ``consumers``."""

    @property
    def norm(self) -> NormKind:
        return NormKind(self.eps)


class LayerNorm(EncodingNorm, nn.LayerNorm):
    """``nn.LayerNorm`` that encodes its output for its ``consumers``."""

    @property
    def norm(self) -> NormKind:
        return NormKind(self.eps, centers=True)


class _Call(NamedTuple):
    """A pass of one kind."""

    why_not: str | None
    """Why it does not encode. It may compute the output all the same: then ``bound`` is there, too."""
    plans: tuple[Plan | None, ...] = ()
    """The plans of the layers, kept as they are known by their addresses."""
    bound: BoundNorm | None = None
    of_input: bool = False
    """Whether ``why_not`` is about the input or what is around the pass."""


class BoundNorm(NamedTuple):
    """A norm of inputs of one shape, with its kernels."""

    norm: NormKind
    groups: Sequence[ConsumerGroup]
    encode: Encode
    gradients: Gradients | None
    """None: ``NormKind.gradients`` computes them."""
    over: DividedNorm | None = None
    """How ranks have its output, where they share out the layers that take it."""
    makes_later: bool = False
    """Whether backward makes a column operand."""


class EncodedNorm(torch.autograd.Function):
    """A norm that encodes its output, if a layer takes it so. It keeps its input, and what a kernel found of the rows.

    With a residual its input is the sum of both. Where it returns the sum, backward adds the gradients that come by the
    sum and by the output. The gradient by the output is not differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, bound: BoundNorm,
        layers: Sequence[Sequence[Layer]], residual: Tensor | None, with_sum: bool,
    ) -> Any:  # fmt: skip
        columns = (weight,) if bias is None else (weight, bias)
        y: Any
        y, normed, rows = bound.encode(x, residual, columns, layers)
        ctx.bound, ctx.n_tensors = bound, 1 + len(columns)
        ctx.later = [encoded.operand_cache[3] for encoded in (y, *y.beside)] if bound.makes_later else ()
        ctx.save_for_backward(normed, *columns, *rows)
        if not with_sum:
            return y
        ctx.set_materialize_grads(False)
        return y, x if residual is None else normed

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, other: Tensor | None = None) -> tuple[Tensor | None, ...]:
        for column in ctx.later:
            if column is not None:  # all layers have had it; those that ran forward again were counted twice
                column.operand = None
        count = ctx.n_tensors
        of_x, *of_columns = ctx.needs_input_grad[:count]
        of_residual = ctx.needs_input_grad[5]
        needed, compute = (of_x or of_residual, *of_columns), ctx.bound.gradients
        grads: Sequence[Tensor | None]
        if dy is None:
            grads = (other, *[None] * (count - 1))
        elif torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: a norm that encodes its output has no second derivative. Leave that out, or call "
                "lpq.unfuse on the block that the norm is in"
            )
        elif compute is not None and needed[0] and can_bypass_dispatcher(dy) and (other is None or _adds(dy, other)):
            with on_device(dy.device):
                grads = compute(dy, *ctx.saved_tensors, needed[1], other)
        else:
            saved = ctx.saved_tensors
            first, *rest = ctx.bound.norm.gradients(dy, saved[:count], saved[count:], needed)
            grads = (first if first is None or other is None else first + other, *rest)
        dx = grads[0]
        return dx if of_x else None, *grads[1:], *[None] * (5 - count), dx if of_residual else None, None


def _adds(x: Tensor, other: Tensor) -> bool:
    """Whether a kernel can add another tensor to this one."""
    alike = other.shape == x.shape and other.dtype is x.dtype and other.device == x.device
    return alike and can_bypass_dispatcher(other)


class _Encoding(NamedTuple):
    """How a norm encodes its output for one group."""

    row: Operand
    col: Operand | None
    run: Callable[[Sequence[Tensor], Sequence[Stats], Sequence[Tensor | None]], list[Produced]]
    """As ``Producer.produce``."""
    apart: bool
    """Whether an encoder runs, which is given the output of the norm in place of the inputs of the source."""


def bind_norm(
    norm: NormKind, groups: Sequence[ConsumerGroup], like: Tensor, biased: bool, others: bool = False,
    adds: bool = False, over: DividedNorm | None = None,
) -> BoundNorm:  # fmt: skip
    """Bind a norm of inputs like this one, encoded as inputs of the layers of these groups; ``others``: with the output
    itself, for others; ``adds``: of sums with a residual; ``over``: how ranks have it.

    A kernel computes and encodes the output for one group after the other. For a format that it does not encode, it
    writes what it computes, and an encoder follows. Where there is no kernel at all, torch's operations compute."""
    shape, dtype, device = like.shape, like.dtype, like.device
    cols = shape[-1]
    matrix = like.numel() // cols if cols else 0, cols
    cut, ranks = (None, "") if over is None else (over.cut, over.group)
    source = norm_source(norm, biased)

    def specs(group: ConsumerGroup) -> tuple[EncoderSpec, EncoderSpec | None]:
        """How forward encodes and, if it does, backward."""
        spec = EncoderSpec(group.plan.x, matrix, dtype, device, True, group.col, "x" in group.plan.remembered)
        return one_by_one(spec) if group.later and over is None else (spec, None)

    apart: list[tuple[ConsumerGroup, _Encoding]] = []
    produced: list[tuple[ConsumerGroup, Output]] = []
    for group in groups:
        spec, _ = specs(group)
        output = Output(spec, cut=cut)
        if why_apart(source, output) is None:
            produced.append((group, output))
        else:
            apart.append((group, _encoded_apart(bind_part(bind_encoder, spec, cut, ranks).alone(ranks).encoder)))
    encodings: list[tuple[ConsumerGroup, _Encoding]] = []
    for group, output in produced:
        gives = not encodings and (others or bool(apart))
        encodings.append((group, _produced(bind_producer(source, [output._replace(value=gives)], ranks))))
    encodings += apart
    find = add = gradients = compute = None
    kernels = kernels_of(source, matrix, dtype, device)
    if not isinstance(kernels, str):
        beside = norm_kernels_of(norm, matrix, dtype, device)
        assert not isinstance(beside, str)
        if not produced:  # by the same instructions as in a pass whose operands it encodes
            compute = kernels.bind(source, matrix, dtype, device, [None], [True])
        gradients = beside.bind_gradients(norm, matrix, dtype, device)
        if adds:
            add = beside.bind_sum_rows(norm, matrix, dtype, device)
        else:
            find = beside.bind_rows(norm, matrix, dtype, device)
    named = None if over is None else (ranks, cut)
    of_kernels = None if isinstance(kernels, str) else source
    again = [spec and column_encoder(norm, of_kernels, spec) for _, spec in (specs(group) for group, _ in encodings)]
    makes_later = any(again)
    is_operand = any(encoding.col is not None and encoding.col.quantizer.plain for _, encoding in encodings)

    def encode(
        x: Tensor, residual: Tensor | None, columns: Sequence[Tensor], layers: Sequence[Sequence[Layer]]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        rows: Sequence[Tensor] = ()
        value: Tensor | None = None
        if add is not None:
            assert residual is not None
            x, rows = add(*aligned(x, residual))
        elif find is not None:
            (x,) = aligned(x)
            rows = find(x)
        else:
            x = x if residual is None else x + residual
            value = norm.compute(x, *columns)
        if compute is not None:
            ((*_, value),) = compute((x, *rows, *columns), (None,), (None,))
        made: list[Any] = []
        version = None if x.is_inference() else version_of(x)
        kept: Sequence[Tensor] = ()
        if makes_later:
            kept = inputs_of_column(x, rows, columns)
        for (group, encoding), encoder, own in zip(encodings, again, layers, strict=True):
            state = shared = shared_state(own) if "x" in group.plan.remembered else None
            if over is not None and state is not None:
                state = local_state(state)
            if encoding.apart:
                assert value is not None
                ((of_row, of_col, measured, _),) = encoding.run((value,), (state or (),), (None,))
            else:
                ((of_row, of_col, measured, given),) = encoding.run((x, *rows, *columns), (state or (),), (None,))
                value = given if value is None else value
            of_side = None if encoding.col is None else encoding.col.storage(of_col)
            encoded: Any = WithValue(encoding.row.storage(of_row), of_side, group.plan.x, shape, dtype)
            encoded.operand_cache = group.plan.x, of_row, of_col, None
            if encoder is not None:
                encoded.operand_cache = group.plan.x, of_row, (*kept, *measured), ColumnOfNorm(encoder, version)
            if state is not None or named is not None:
                encoded.encoded_by = EncodedBy(own, shared or {}, measured, group.col, named)
            made.append(encoded)
        if not made:
            assert value is not None
            return unsafe_view(value, shape), x, rows  # no view to autograd: others may write to it
        first, *beside = made
        if others and value is not None:
            whole = value.view(shape)
            first.source = whole.clone if is_operand else whole  # others may write to it, for themselves
        else:
            first.source = partial(value_of, norm, x, columns, version)
        first.beside = beside
        return first, x, rows

    return BoundNorm(norm, [group for group, _ in encodings], encode, gradients, over, makes_later)


def _produced(producer: Producer) -> _Encoding:
    ((row, col),) = producer.operands
    assert row is not None
    return _Encoding(row, col, producer.produce, False)


def _encoded_apart(encoder: Encoder) -> _Encoding:
    def run(values: Sequence[Tensor], known: Sequence[Stats], seeds: Sequence[Tensor | None]) -> list[Produced]:
        return [Produced(*encoder.encode(as_matrix(values[0]), known[0], seeds[0]), None)]

    assert encoder.row is not None
    return _Encoding(encoder.row, encoder.col, run, True)
