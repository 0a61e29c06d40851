"""An MLP, ``down(silu(gate(x)) * up(x))`` or ``down(gelu(up(x)))``, as one function to autograd where its layers
allow it.

The activation of ``gate`` times ``up``, or the activation of ``up`` alone, goes into the last layer encoded, and the
gradients of both go into the first layers encoded: one kernel computes and encodes them, and none of these matrices is
written in high precision, but for a gradient that is summed for a bias. Each layer runs as it does by itself
(``lpq/nn/multiply.py``), with the encoders of this function in place of its own. So all bytes are the same as if the
layers ran one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lpq import registry
from lpq.kernels.table import kernels_allowed
from lpq.nn.linear import Layer
from lpq.nn.multiply import LayerCall, Multiplication, StepChange, Within
from lpq.nn.step import Step, gradient_wanted, input_wanted
from lpq.nn.wanted import computes
from lpq.operations.binding import Encoded
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.encoder import Encoder, Known, operands_of
from lpq.operations.inputs import as_matrix
from lpq.operations.produced_tiles import Produced
from lpq.operations.producer import Output, Producer, bind_producer
from lpq.operations.sides import shared
from lpq.operations.source import ACTIVATIONS, Activation, Between, Source
from lpq.operations.states import moves
from lpq.torch_private.dispatch import autocasts
from lpq.torch_private.hooks import global_hooks, has_hooks

OF_X = Within(x=False, dy=True)
OF_PRODUCT = Within(x=True, dy=False)


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


def mlp(x: Tensor, before: Sequence[nn.Module], down: nn.Module, activation: Activation) -> Tensor:
    """``down(act(gate(x)) * up(x))`` where ``before`` is gate and up, and ``down(act(up(x)))`` where it is up alone, as
    one function where the layers allow it; see ``swiglu``."""
    if not torch.compiler.is_compiling() and why_apart(before, down) is None:
        y = _fused(x, before, down, activation)  # type: ignore[arg-type]
        if y is not None:
            return y
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
        return swiglu(x, self.gate_proj, self.up_proj, self.down_proj)


def why_apart(before: Sequence[nn.Module], down: nn.Module) -> str | None:
    """Why layers are computed one after the other; None if they are one function. ``before``: as in ``mlp``."""
    if global_hooks():
        return "a hook is called with every module"
    for name, layer in zip(("gate", "up", "down")[-1 - len(before) :], (*before, down), strict=True):
        if not isinstance(layer, Layer) or type(layer).forward is not Layer.forward or "forward" in vars(layer):
            return f"its {name} is a {type(layer).__name__} with a forward of its own, and no lpq.nn.Linear"
        if layer.passes.plan is None:
            return f"its {name} has no recipe"
        if has_hooks(layer):
            return f"hooks are called with its {name}"
        if layer.passes.observers:
            return f"its {name} is observed"
        if layer.layouts is not None or hasattr(layer._parameters.get("weight"), "device_mesh"):
            return f"ranks share out the weight of its {name}"
        if name == "down" and rounds_stochastically(layer.passes.plan.x):
            return f"its {name} rounds inputs with random bits"
    return None


def _fused(x: Tensor, before: Sequence[Layer], down: Layer, activation: Activation) -> Tensor | None:
    """The output of layers that nothing keeps apart; None if something watches this pass or traces it."""
    first = before[0].prepare(x, OF_X)
    if first is None:
        return None
    prepared = [first]
    for layer in before[1:]:
        also = layer.prepare(x, OF_X)
        assert also is not None
        prepared.append(also)
    shapes = first.call.shapes
    like = torch.empty((), dtype=shapes.dtype, device=x.device).expand(*x.shape[:-1], shapes.outputs)
    trained = (x, *(of.weight for of in prepared), *(layer.bias for layer in before if layer.bias is not None))
    like.requires_grad_(torch.is_grad_enabled() and any(t.requires_grad for t in trained))
    of_down = down.prepare(like, OF_PRODUCT)
    assert of_down is not None
    weights, calls = zip(*prepared, of_down, strict=True)
    tensors = *weights, *(layer.bias for layer in (*before, down))
    compute: Any = FusedMLP.apply
    y: Tensor
    if not autocasts():
        y = compute(activation, calls, x, *tensors)
        return y
    with torch.autocast(x.device.type, enabled=False):
        y = compute(activation, calls, x, *tensors)
        return y


class LayerContext:
    """The context of one layer within the function, as ``Multiplication`` has it."""

    call: LayerCall
    counts: tuple[int, int, int, int]
    encoded_gradient: object = None
    dy_state: Any = None

    def __init__(self) -> None:
        self.saved_tensors: tuple[Tensor, ...] = ()
        self.saved = 0
        self.needs_input_grad: tuple[bool, bool, bool] = (False, False, False)
        self.next_functions: Sequence[tuple[Any, int]] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def give(self) -> tuple[Tensor, ...]:
        """Return the saved tensors, for autograd to keep."""
        tensors, self.saved_tensors = self.saved_tensors, ()
        self.saved = len(tensors)
        return tensors

    def take(self, saved: Iterator[Tensor], needs: tuple[bool, bool, bool], nodes: Sequence[tuple[Any, int]]) -> None:
        """Take the saved tensors back, for a backward that is to make these gradients of x, weight and bias."""
        self.saved_tensors = tuple(islice(saved, self.saved))
        self.needs_input_grad, self.next_functions = needs, nodes


class Activated:
    """The result of the activation on its way into the last layer, and its gradient on its way back."""

    def __init__(
        self, inputs: Sequence[Tensor], before: Sequence[LayerContext], down: LayerContext, of: Between
    ) -> None:
        self._inputs = [as_matrix(x) for x in inputs]
        self._before, self._down, self._of = before, down, of
        self.made: list[Produced] = []
        """The gradients of the inputs and what the activation makes once more, encoded, as soon as the gradient of that
        is there."""

    def forward(self, call: LayerCall, step: Step) -> Step:
        """Give the last layer its row operand. Backward makes the column operand, as the product is not kept; of a
        state, which moves until then, that keeps a copy."""
        wanted = input_wanted(call.plan, call.shapes)
        row, col = wanted.quantizer.side("row"), wanted.quantizer.side("col")
        measured = wanted.remembers and wanted.col and not shared(row, col) and moves(wanted.quantizer, row, col)

        def encode(x: Tensor, known: Known, seed: Tensor | None) -> Encoded:
            (made,) = self._produce(
                self._of.product, (Output(wanted._replace(col=measured)),), self._inputs, [known], [seed]
            )
            kept = [memory.clone() for memory in known.values()] if wanted.remembers and wanted.col else ()
            return made.row, kept, made.stats

        return step._replace(x=Encoder(*operands_of(wanted), encode))

    def backward(self, step: Step) -> Step:
        """Take the gradient from the last layer, and give it its column operand."""
        down, multiply = self._down, step.dgrad
        call = down.call
        wanted = input_wanted(call.plan, call.shapes)
        column = Output(wanted._replace(row=False) if wanted.col else None)

        def remembered(kept: Sequence[Tensor]) -> Known:
            return dict(zip(call.states["x"], kept, strict=True)) if wanted.remembers and wanted.col else None

        def dgrad(dy: Sequence[Tensor], weight: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            assert multiply is not None
            outputs, known, seeds = zip(*(_gradient_of(part) for part in self._before), strict=True)
            then = remembered(down.saved_tensors[: down.counts[0]])
            inputs = *self._inputs, multiply(dy, weight, bias)
            self.made = self._produce(self._of.backward, (*outputs, column), inputs, (*known, then), (*seeds, None))
            return None  # type: ignore[return-value]  # it has gone where it is needed

        def later(kept: Sequence[Tensor]) -> Sequence[Tensor]:
            if not self.made:
                self.made = self._produce(self._of.product, (column,), self._inputs, [remembered(kept)], [None])
            return self.made.pop().col

        encoder = Encoder(*operands_of(wanted), lambda x, known, seed: ((), (), ()), later)
        return step._replace(x=encoder, dgrad=None if multiply is None else dgrad)

    def _produce(
        self, source: Source, outputs: tuple[Output, ...], inputs: Sequence[Tensor], known: Sequence[Known],
        seeds: Sequence[Tensor | None],
    ) -> list[Produced]:  # fmt: skip
        return _producer(source, outputs, kernels_allowed()).produce(inputs, known, seeds)


@registry.cached_few
def _producer(source: Source, outputs: tuple[Output, ...], kernels: object) -> Producer:
    return bind_producer(source, outputs)


def _gradient_of(part: LayerContext) -> tuple[Output, Known, Tensor | None]:
    """How the gradient of the output of a layer is encoded, its state and its seed."""
    call = part.call
    wanted = gradient_wanted(call.plan, call.shapes)
    summed = part.needs_input_grad[2]
    if not (wanted.row or wanted.col):
        return Output(None, summed), None, None
    state = call.states.get("dy") if part.dy_state is None else part.dy_state
    return Output(wanted, summed), state, part.saved_tensors[sum(part.counts)] if call.plan.stochastic else None


def _arrived(made: Produced) -> StepChange:
    """Give a layer the gradient of its output, encoded."""

    def change(step: Step) -> Step:
        row = made.row if step.dy.row is not None else ()
        col = made.col if step.dy.col is not None else ()
        return step._replace(dy=step.dy._replace(encode=lambda dy, known, seed: (row, col, made.stats)))

    return change


class FusedMLP(torch.autograd.Function):
    """The layers and what lies between them. Its tensors are the input, the weights and then the biases of all layers,
    the last layer's behind the others."""

    @staticmethod
    def forward(
        ctx: Any, activation: Activation, calls: Sequence[LayerCall], x: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        count = len(calls)
        parts = *before, down = [LayerContext() for _ in calls]
        *given, (w_down, of_down, b_down) = zip(tensors[:count], calls, tensors[count:], strict=True)
        inputs = []
        for part, (weight, call, bias) in zip(before, given, strict=True):
            assert weight is not None
            inputs.append(Multiplication.forward(part, x, weight, bias, call))
        of_down = of_down._replace(inputs=None)  # no other layer has this input
        between = activation.gated if len(before) > 1 else activation.alone
        then = Activated(inputs, before, down, between)
        assert w_down is not None
        y = Multiplication.forward(down, inputs[0], w_down, b_down, of_down, partial(then.forward, of_down))
        ctx.save_for_backward(*inputs, *(t for part in parts for t in part.give()))
        ctx.parts, ctx.between, ctx.there = parts, between, [t is not None for t in (x, *tensors)]
        if down.encoded_gradient is not None:
            ctx.encoded_gradient = down.encoded_gradient
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        parts: Sequence[LayerContext] = ctx.parts
        *before, down = parts
        saved, at = iter(ctx.saved_tensors), iter(ctx.next_functions)
        inputs = [*islice(saved, len(before))]
        nodes = [next(at) if there else (None, 0) for there in ctx.there]  # of the tensors
        needs = ctx.needs_input_grad[2:]
        count = len(parts)
        for i, part in enumerate(before, 1):
            of = 0, i, count + i
            part.take(saved, tuple(needs[k] for k in of), [nodes[k] for k in of])
        # The gradient of what the activation makes is wanted where one of these is.
        earlier = [k for k in range(2 * count) if k != count]
        wanted = next((nodes[k] for k in earlier if nodes[k][0] is not None and computes(nodes[k][0])), nodes[0])
        down.take(
            saved, (any(needs[k] for k in earlier), needs[count], needs[2 * count]),
            (wanted, nodes[count], nodes[2 * count]),
        )  # fmt: skip
        then = Activated(inputs, before, down, ctx.between)
        _, *of_down, _ = Multiplication.backward(down, dy, then.backward)
        dx: Tensor | None = None
        grads: list[Sequence[Tensor | None]] = [(None, None)] * len(before)
        for i, (part, y, made) in reversed([*enumerate(zip(before, inputs, then.made, strict=False))]):
            gradient = y if made.value is None else made.value.view(y.shape)
            also, dw, db, _ = Multiplication.backward(part, gradient, _arrived(made))
            grads[i] = dw, db
            if dx is not None and also is not None:
                dx.add_(also)
            else:
                dx = also if dx is None else dx
        for part in parts:
            part.give()
        weights, biases = zip(*grads, of_down, strict=True)
        return None, None, dx, *weights, *biases
