"""An MLP, ``down(silu(gate(x)) * up(x))`` or ``down(gelu(up(x)))``, as one function to autograd where its layers
allow it.

The activation of ``gate`` times ``up``, or the activation of ``up`` alone, goes into the last layer encoded, and the
gradients of both go into the first layers encoded: one kernel computes and encodes them, and none of these matrices is
written in high precision, but for a gradient that is summed for a bias. Each layer runs as it does by itself
(``lpq/nn/multiply.py``), with the encoders of this function in place of its own. So all bytes are the same as if the
layers ran one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lpq.distributed.shard import WeightShard
from lpq.emulation.bf16_gemm import multiplied_exactly
from lpq.nn.linear import Layer
from lpq.nn.multiply import LayerCall, LayerContext, Multiplication, Prepared, Within
from lpq.nn.passes import Passes
from lpq.nn.stand_ins import Read, changed
from lpq.nn.step import Step, gradient_spec, input_spec
from lpq.nn.wanted import computes
from lpq.operations.binding import Encoded, on_device
from lpq.operations.encoder import Encoder, Stats, operands_of
from lpq.operations.produced_tiles import Produced
from lpq.operations.producer import Output, Producer, bind_producer
from lpq.operations.sides import shared
from lpq.operations.source import ACTIVATIONS, Activation
from lpq.operations.states import moves
from lpq.tensor.with_value import WithValue
from lpq.torch_private.autograd import runs_whole
from lpq.torch_private.dispatch import autocasts
from lpq.torch_private.hooks import global_hooks, has_hooks, hooks_of, laid_out_by_own

OF_X = Within(x=False, dy=True)
OF_PRODUCT = Within(x=True, dy=False)
GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
"""The activation of each ``approximate`` of ``F.gelu``."""
NO_RECIPE = "has no recipe"
EVERY_MODULE = "a hook is called with every module"
HOOKED = "hooks are called with its activation"


def swiglu(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """Return ``down(silu(gate(x)) * up(x))``.

    Three layers that ``lpq.convert`` made are computed as one function, if nothing keeps them apart; see ``why_apart``.
    The result and all gradients are the same to the bit.

    Args:
        x: The input, with the features of ``gate`` and ``up`` along its last dimension.
        gate: The layer whose output goes through SiLU.
        up: The layer whose output is multiplied by that.
        down: The layer that takes the product.
    """
    return mlp(x, (gate, up), down, ACTIVATIONS["silu"])


def geglu(
    x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, approximate: Literal["none", "tanh"] = "none"
) -> Tensor:
    """Return ``down(gelu(gate(x)) * up(x))``; see ``swiglu``.

    Args:
        x: The input, with the features of ``gate`` and ``up`` along its last dimension.
        gate: The layer whose output goes through the GELU.
        up: The layer whose output is multiplied by that.
        down: The layer that takes the product.
        approximate: As of ``F.gelu``: the GELU by erf, or its approximation by tanh.
    """
    if approximate not in GELUS:
        raise ValueError(f"geglu: approximate={approximate!r}: it is one of {', '.join(map(repr, GELUS))}")
    return mlp(x, (gate, up), down, ACTIVATIONS[GELUS[approximate]])


def mlp(x: Tensor, before: Sequence[nn.Module], down: nn.Module, activation: Activation) -> Tensor:
    """``down(act(gate(x)) * up(x))`` where ``before`` is gate and up, and ``down(act(up(x)))`` where it is up alone, as
    one function where the layers allow it; see ``swiglu``."""
    high = autocasts() and activation.is_high  # which takes a call only where it may be true
    if torch.compiler.is_compiling() or high or why_apart(before, down) is not None:
        return _apart(x, before, down, activation)
    for layer in (*before, down):
        weight = layer._parameters.get("weight")  # a shard waits for its gather; this is in every step
        if layer.passes.fresh or isinstance(weight, WeightShard):  # type: ignore[union-attr]  # producers encode by states
            return _apart(x, before, down, activation)
    prepared: list[Any] = []
    for layer in before:
        prepared.append(layer.forward(x, OF_X))
        if prepared[0] is None:  # something watches this pass, or traces it
            return _apart(x, before, down, activation)
    grad = torch.is_grad_enabled()
    summed = tuple(grad and of.bias is not None and of.bias.requires_grad for of in prepared)
    calls = [of.call for of in prepared]
    key = prepared[0].shape, id(activation), summed, *(id(call.step) for call in calls)
    passes: Passes = down.passes  # type: ignore[assignment]
    bound: BoundMLP | None = passes.calls[1].get(key)
    like = _like(prepared[0], calls, summed) if bound is None else bound.like
    if isinstance(prepared[0].input, WithValue):  # which the last of them may take in high precision
        calls = [
            call if call.input is not None or call.values is not None else call._replace(values=of.input)
            for call, of in zip(calls, prepared, strict=True)
        ]
    prepared.append(down.forward(like, OF_PRODUCT))
    call = prepared[-1].call
    if bound is None or bound.key_objects[-1] is not call.step:
        bound = passes.bound_calls()[key] = _bind([*calls, call], activation, summed, like)
    calls.append(call._replace(step=bound.down))
    compute: Any = FusedMLP.apply
    x_of_gate = (prepared[0].input,) if len(before) > 1 else ()
    tensors = prepared[-2].input, *(of.weight for of in prepared), *(of.bias for of in prepared), *x_of_gate
    finish = prepared[-1].finish
    y: Tensor
    with on_device(x.device):
        if not autocasts():
            y = compute(bound, calls, *tensors)
        else:
            with torch.autocast(x.device.type, enabled=False):
                y = compute(bound, calls, *tensors)
    return y if finish is None else laid_out_by_own(down, like, finish(y))


def _apart(x: Tensor, before: Sequence[nn.Module], down: nn.Module, activation: Activation) -> Tensor:
    """Compute the layers one after the other. A tensor among them keeps the others apart, and is refused here."""
    for name, layer in _named(before, down):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"{name} is a {type(layer).__name__}: it is the layer itself, not its weight or its output")
    return down(activation.compute(*(layer(x) for layer in before)))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, which is one function after ``lpq.convert``; see ``swiglu``."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = nn.Linear(hidden_features, in_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, (self.gate_proj, self.up_proj), self.down_proj, ACTIVATIONS["silu"])


def why_apart(before: Sequence[nn.Module], down: nn.Module, gathered: Collection[nn.Module] = ()) -> str | None:
    """Why layers are computed one after the other; None if they are one function. ``before``: as in ``mlp``.
    ``gathered``: modules whose parameters FSDP2 makes ordinary tensors for a pass, of which this is asked before."""
    if global_hooks():
        return EVERY_MODULE
    for name, layer in _named(before, down):
        if type(layer) is nn.Linear:
            return f"its {name} {NO_RECIPE}"
        if not isinstance(layer, nn.Module):
            return f"its {name} is {kind_of(layer)}, and no module"
        if not isinstance(layer, Layer) or type(layer).forward is not Layer.forward or "forward" in vars(layer):
            around = not isinstance(layer, Layer) and any(isinstance(m, Layer) for m in layer.modules())
            what = ", around a layer of lpq" if around else "" if isinstance(layer, Layer) else ", and no lpq.nn.Linear"
            return f"its {name} is {kind_of(layer)} with a forward of its own{what}"
        if layer.passes.plan is None:
            return f"its {name} {NO_RECIPE}"
        if any(hooks_of(layer)) and has_hooks(layer):
            return f"hooks are called with its {name}"
        if layer.passes.observers:
            return f"its {name} is observed"
        if name == "down" and layer.passes.plan.draws_for_x:
            return f"its {name} rounds inputs with random bits"
        if name != "down" and layer.passes.plan.dearer_fused and _multiplies_in_bf16(layer):
            return f"gradients of its {name} are measured first and multiplied in bf16 here: fused, a model took longer"
    layers: list[Any] = [layer for layer in (*before, down) if layer not in gathered]
    if any(layer.layouts is not None or hasattr(layer._parameters.get("weight"), "device_mesh") for layer in layers):
        from lpq.nn.parallel_mlp import why_not  # which imports torch.distributed

        return why_not(layers)
    return None


def why_changed(
    module: nn.Module, children: Mapping[str, nn.Module | None], layers: Collection[str | None], reads: Sequence[Read]
) -> str | None:
    """Why an activation no longer stands for what a module computes; None if it does. ``children``: those that it had,
    ``layers``: the names of those that are called, ``reads``: the attributes that its forward read."""
    if global_hooks():
        return EVERY_MODULE
    if children != module._modules:
        now = {name: child for name, child in module._modules.items() if children.get(name) is not child}
        name, child = next(iter(now.items()), ("child", None))
        return f"its {name} is another module since, {kind_of(child)}: call lpq.fuse again"
    if any(has_hooks(child) for name, child in children.items() if child is not None and name not in layers):
        return HOOKED
    was = changed(reads)
    return None if was is None else f"its {was} was set since: call lpq.fuse again"


def _named(before: Sequence[nn.Module], down: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return zip(("gate", "up", "down")[-1 - len(before) :], (*before, down), strict=True)


def kind_of(module: nn.Module | None) -> str:
    """The class of a module in words, with its package: adapters have the names of torch's layers."""
    package, _, _ = type(module).__module__.partition(".")
    return f"{package}'s {type(module).__name__}" if module is not None else "None"


def _multiplies_in_bf16(layer: Layer) -> bool:
    plan, weight = layer.passes.plan, layer._parameters.get("weight")
    if plan is None or weight is None:
        return False
    return any(multiplied_exactly(product, weight.device) for product in (plan.dgrad, plan.wgrad))


class BoundMLP(NamedTuple):
    """The producers between the layers, bound to passes of one kind."""

    down: Step
    """The step of the last layer, with a producer as the encoder of its input, which is given the outputs of the
    others. It makes the row operand. Backward makes the column operand, as the product is not kept; of a state, which
    moves until then, that keeps a copy. Where ranks share out the product, it makes both, as their statistics are
    exchanged once."""
    keeps_column: bool
    """Whether the column operand is kept."""
    remembered: tuple[str, ...]
    """The names in that state."""
    gradients: Callable[[], Producer]
    """Makes, of these and the gradient of the product, their gradients and the column operand."""
    column: Callable[[], Producer]
    """Makes the column operand alone."""
    like: Tensor
    """To the last layer it is as the product, but it has no memory."""
    key_objects: tuple[object, ...]
    """The activation and the steps of the layers, kept as they are known by their addresses."""


def _like(first: Prepared, calls: Sequence[LayerCall], summed: Sequence[bool]) -> Tensor:
    shapes = first.call.shapes
    like = torch.empty((), dtype=shapes.dtype, device=shapes.device).expand(*first.shape)
    return like.requires_grad_(shapes.needs_dx or any(call.shapes.needs_dw for call in calls) or any(summed))


def _bind(calls: Sequence[LayerCall], activation: Activation, summed: Sequence[bool], like: Tensor) -> BoundMLP:
    """``summed``: for each layer before the last whether the gradient of its bias is wanted."""
    *before, down = calls
    assert down.step is not None
    if (gate := before[0]).shapes.outputs != (up := before[-1]).shapes.outputs:
        sizes = f"{gate.shapes.outputs} outputs of {gate.title} and {up.shapes.outputs} of {up.title}"
        raise ValueError(f"{sizes} cannot be multiplied with each other: gate and up must have equally many")
    between = activation.gated if len(before) > 1 else activation.alone
    key_objects = activation, *(call.step for call in calls)
    if down.shapes.parts is not None:
        from lpq.nn.parallel_mlp import bind_parts

        step, of_parts = bind_parts(calls, between, summed)
        return BoundMLP(step, True, (), cache(of_parts), cache(of_parts), like, key_objects)
    gradients = [gradient_spec(call.plan, call.shapes) for call in before]
    outputs = [Output(w if w.row or w.col else None, value) for w, value in zip(gradients, summed, strict=True)]
    spec = input_spec(down.plan, down.shapes)
    row, col = spec.quantizer.side("row"), spec.quantizer.side("col")
    remembered = tuple(down.states["x"]) if spec.remembers and spec.col else ()
    measured = bool(remembered) and not shared(row, col) and moves(spec.quantizer, row, col)
    produce = bind_producer(between.product, [Output(spec._replace(col=measured))]).produce

    def encode(x: Sequence[Tensor], own: Stats, seed: Tensor | None) -> Encoded:
        ((of_row, _, stats, _),) = produce(x, (own,), (seed,))
        return of_row, [memory.clone() for memory in own.values()] if remembered else (), stats

    column = Output(spec._replace(row=False) if spec.col else None)
    return BoundMLP(
        down.step._replace(x=Encoder(*operands_of(spec), encode)), False, remembered,
        cache(lambda: bind_producer(between.backward, [*outputs, column])),
        cache(lambda: bind_producer(between.product, [column])), like, key_objects,
    )  # fmt: skip


backward_of_layer = Multiplication.backward
"""Compiled autograd, which traces this function, traces methods of autograd functions with a context of torch alone."""


class FusedMLP(torch.autograd.Function):
    """The layers and what lies between them. Its tensors are the input, the weights and then the biases of all layers,
    the last layer's behind the others; and the input of the gate, if there is one. Autograd adds the gradients of the
    input as it adds gradients of layers: the input may go elsewhere, too, and three tensors have sums of two orders.
    Where ranks share out gate and up, and one layer's format differs, the gradient of each is summed by itself."""

    @staticmethod
    def forward(ctx: Any, bound: BoundMLP, calls: Sequence[LayerCall], x: Tensor, *tensors: Tensor | None) -> Tensor:
        count = len(calls)
        parts = *before, down = [LayerContext() for _ in calls]
        inputs = []
        for i, part in enumerate(before):
            weight, own_x = tensors[i], tensors[-1] if i < len(before) - 1 else x
            assert weight is not None
            assert own_x is not None
            inputs.append(Multiplication.forward(part, own_x, weight, tensors[count + i], calls[i], None, True))
        w_down = tensors[count - 1]
        assert w_down is not None
        y = Multiplication.forward(down, inputs[0], w_down, tensors[2 * count - 1], calls[-1], inputs, True)
        saved = list(inputs)
        for part in parts:
            saved += part.saved_tensors
            part.saved, part.saved_tensors = len(part.saved_tensors), ()
        ctx.save_for_backward(*saved)
        ctx.parts, ctx.bound, ctx.there = parts, bound, [t is not None for t in (x, *tensors)]
        if down.encoded_gradient is not None:
            ctx.encoded_gradient = down.encoded_gradient
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        bound: BoundMLP = ctx.bound
        parts: Sequence[LayerContext] = ctx.parts
        *before, down = parts
        saved, at = iter(ctx.saved_tensors), iter(ctx.next_functions)
        inputs = [*islice(saved, len(before))]
        nodes = [next(at) if there else (None, 0) for there in ctx.there]  # of the tensors
        needs = ctx.needs_input_grad[2:]
        count = len(parts)
        for i, part in enumerate(parts, 1):
            part.saved_tensors = tuple(islice(saved, part.saved))
            of_x = -1 if i < len(before) else 0  # the gate's is the last tensor
            part.needs_input_grad = needs[of_x], needs[i], needs[count + i]
            part.next_functions = nodes[of_x], nodes[i], nodes[count + i]
        # The gradient of what the activation makes is wanted where one of these is.
        earlier = [k for k in range(2 * count) if k != count]
        node = nodes[0]
        if not runs_whole():
            node = next((nodes[k] for k in earlier if nodes[k][0] is not None and computes(nodes[k][0])), node)
        down.needs_input_grad = any(needs[k] for k in earlier), needs[count], needs[2 * count]
        down.next_functions = node, nodes[count], nodes[2 * count]
        products: list[Produced] = []

        def source(gradient: Tensor | None, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            of_product = dict(zip(bound.remembered, tensors, strict=True)) if bound.remembered else ()
            if gradient is None:
                return tensors if bound.keeps_column else bound.column().produce(inputs, [of_product], [None])[0].col
            stats: list[Stats] = [p.call.states.get("dy", ()) if p.dy_state is None else p.dy_state for p in before]
            seeds = [p.saved_tensors[sum(p.counts)] if p.call.plan.stochastic else None for p in before]
            products.extend(bound.gradients().produce((*inputs, gradient), [*stats, of_product], [*seeds, None]))
            column = products.pop().col
            return tensors if bound.keeps_column else column

        _, *of_down, _ = backward_of_layer(down, dy, source=source)
        dx: list[Tensor | None] = []
        grads: list[Sequence[Tensor | None]] = [(None, None)] * len(before)
        for i, (part, y, operands) in reversed([*enumerate(zip(before, inputs, products, strict=False))]):
            shaped = y if operands.value is None else operands.value.view(y.shape)
            also, dw, db, _ = backward_of_layer(part, shaped, operands)
            grads[i] = dw, db
            dx.append(also)
        for part in parts:
            part.saved_tensors = ()
        weights, biases = zip(*grads, of_down, strict=True)
        last, *first = dx or [None] * len(before)
        return None, None, last, *weights, *biases, *first
