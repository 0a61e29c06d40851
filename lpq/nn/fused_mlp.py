"""A gated MLP, ``down(silu(gate(x)) * up(x))``, as one function to autograd where its three layers allow it.

The product of ``silu(gate)``, or of another activation, and ``up`` goes into the last layer encoded, and the gradients
of both go into the first two layers encoded: one kernel computes and encodes them, and none of the three matrices is
written in high precision. Each layer runs as it does by itself (``lpq/nn/multiply.py``), with the encoders of this
function in place of its own. So all bytes are the same as if the three layers ran one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpq import registry
from lpq.kernels.table import kernels_allowed
from lpq.nn.linear import Layer
from lpq.nn.multiply import Change, LayerCall, Multiplication, Within
from lpq.nn.step import Step, gradient_wanted, input_wanted
from lpq.nn.wanted import computes
from lpq.operations.binding import Encoded
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.encoder import Encoder, Known, operands_of
from lpq.operations.inputs import as_matrix
from lpq.operations.produced_tiles import Produced
from lpq.operations.producer import Output, Producer, bind_producer
from lpq.operations.sides import shared
from lpq.operations.source import (
    GEGLU,
    GEGLU_BACKWARD,
    GEGLU_TANH,
    GEGLU_TANH_BACKWARD,
    SWIGLU,
    SWIGLU_BACKWARD,
    Source,
)
from lpq.operations.states import moves
from lpq.torch_private.dispatch import autocasts
from lpq.torch_private.hooks import global_hooks, has_hooks


class Activation(NamedTuple):
    """The function between the layers."""

    function: Callable[[Tensor], Tensor]
    product: Source
    """Computes its value of gate, times up."""
    backward: Source


ACTIVATIONS = {
    "silu": Activation(F.silu, SWIGLU, SWIGLU_BACKWARD),
    "gelu": Activation(F.gelu, GEGLU, GEGLU_BACKWARD),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), GEGLU_TANH, GEGLU_TANH_BACKWARD),
}
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
    return gated_mlp(x, gate, up, down, "silu")


def gated_mlp(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, activation: str) -> Tensor:
    """As ``swiglu``, with one of ``ACTIVATIONS``."""
    if not torch.compiler.is_compiling() and why_apart(gate, up, down) is None:
        y = _fused(x, gate, up, down, ACTIVATIONS[activation])  # type: ignore[arg-type]
        if y is not None:
            return y
    return down(ACTIVATIONS[activation].function(gate(x)) * up(x))  # type: ignore[no-any-return]


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


def why_apart(gate: nn.Module, up: nn.Module, down: nn.Module) -> str | None:
    """Why three layers are computed one after the other; None if they are one function."""
    if global_hooks():
        return "a hook is called with every module"
    for name, layer in (("gate", gate), ("up", up), ("down", down)):
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
        if name != "down" and layer.bias is not None:
            return f"its {name} has a bias, whose gradient is a sum in high precision"
        if name == "down" and rounds_stochastically(layer.passes.plan.x):
            return f"its {name} rounds inputs with random bits"
    return None


def _fused(x: Tensor, gate: Layer, up: Layer, down: Layer, activation: Activation) -> Tensor | None:
    """The output of three layers that nothing keeps apart; None if something watches this pass or traces it."""
    of_gate = gate.prepare(x, OF_X)
    if of_gate is None:
        return None
    of_up = up.prepare(x, OF_X)
    assert of_up is not None
    shapes = of_gate.call.shapes
    like = torch.empty((), dtype=shapes.dtype, device=x.device).expand(*x.shape[:-1], shapes.outputs)
    grad = torch.is_grad_enabled()
    like.requires_grad_(grad and (x.requires_grad or of_gate.weight.requires_grad or of_up.weight.requires_grad))
    of_down = down.prepare(like, OF_PRODUCT)
    assert of_down is not None
    weights, calls = zip(of_gate, of_up, of_down, strict=True)
    compute: Any = FusedMLP.apply
    y: Tensor
    if not autocasts():
        y = compute(x, *weights, down.bias, calls, activation)
        return y
    with torch.autocast(x.device.type, enabled=False):
        y = compute(x, *weights, down.bias, calls, activation)
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


class GatedProduct:
    """``silu(gate) * up`` on its way into the last layer, and its gradient on its way back."""

    def __init__(
        self, gate: Tensor, up: Tensor, parts: tuple[LayerContext, LayerContext, LayerContext], activation: Activation
    ) -> None:
        self._inputs = as_matrix(gate), as_matrix(up)
        self._parts, self._activation = parts, activation
        self.made: list[Produced] = []
        """Both gradients and the product once more, encoded, as soon as the gradient of the product is there."""

    def forward(self, call: LayerCall, step: Step) -> Step:
        """Give the last layer its row operand. Backward makes the column operand, as the product is not kept; of a
        state, which moves until then, that keeps a copy."""
        wanted = input_wanted(call.plan, call.shapes)
        row, col = wanted.quantizer.side("row"), wanted.quantizer.side("col")
        measured = wanted.remembers and wanted.col and not shared(row, col) and moves(wanted.quantizer, row, col)

        def encode(x: Tensor, known: Known, seed: Tensor | None) -> Encoded:
            (made,) = self._produce(
                self._activation.product, (Output(wanted._replace(col=measured)),), self._inputs, [known], [seed]
            )
            kept = [memory.clone() for memory in known.values()] if wanted.remembers and wanted.col else ()
            return made.row, kept, made.stats

        return step._replace(x=Encoder(*operands_of(wanted), encode))

    def backward(self, step: Step) -> Step:
        """Take the gradient of the product from the last layer, and give it its column operand."""
        down, multiply = self._parts[2], step.dgrad
        call = down.call
        wanted = input_wanted(call.plan, call.shapes)
        column = Output(wanted._replace(row=False) if wanted.col else None)

        def remembered(kept: Sequence[Tensor]) -> Known:
            return dict(zip(call.states["x"], kept, strict=True)) if wanted.remembers and wanted.col else None

        def dgrad(dy: Sequence[Tensor], weight: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            assert multiply is not None
            outputs, known, seeds = zip(*(_gradient_of(part) for part in self._parts[:2]), strict=True)
            then = remembered(down.saved_tensors[: down.counts[0]])
            inputs = *self._inputs, multiply(dy, weight, bias)
            self.made = self._produce(
                self._activation.backward, (*outputs, column), inputs, (*known, then), (*seeds, None)
            )
            return None  # type: ignore[return-value]  # it has gone where it is needed

        def later(kept: Sequence[Tensor]) -> Sequence[Tensor]:
            if not self.made:
                self.made = self._produce(self._activation.product, (column,), self._inputs, [remembered(kept)], [None])
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
    if not (wanted.row or wanted.col):
        return Output(None), None, None
    state = call.states.get("dy") if part.dy_state is None else part.dy_state
    return Output(wanted), state, part.saved_tensors[sum(part.counts)] if call.plan.stochastic else None


def _arrived(made: Produced) -> Change:
    """Give a layer the gradient of its output, encoded."""

    def change(step: Step) -> Step:
        row = made.row if step.dy.row is not None else ()
        col = made.col if step.dy.col is not None else ()
        return step._replace(dy=step.dy._replace(encode=lambda dy, known, seed: (row, col, made.stats)))

    return change


class FusedMLP(torch.autograd.Function):
    """Three layers and what lies between them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, bias: Tensor | None,
        calls: tuple[LayerCall, LayerCall, LayerCall], activation: Activation,
    ) -> Tensor:  # fmt: skip
        of_gate, of_up, of_down = calls
        parts = gate, up, down = LayerContext(), LayerContext(), LayerContext()
        g = Multiplication.forward(gate, x, w_gate, None, of_gate)
        u = Multiplication.forward(up, x, w_up, None, of_up)
        of_down = of_down._replace(inputs=None)  # no other layer has this input
        product = GatedProduct(g, u, parts, activation)
        y = Multiplication.forward(down, g, w_down, bias, of_down, partial(product.forward, of_down))
        ctx.save_for_backward(g, u, *gate.give(), *up.give(), *down.give())
        ctx.parts, ctx.activation = parts, activation
        if down.encoded_gradient is not None:
            ctx.encoded_gradient = down.encoded_gradient
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        parts = gate, up, down = ctx.parts
        g, u, *rest = ctx.saved_tensors
        x, w_gate, w_up, w_down, bias = ctx.needs_input_grad[:5]
        saved, nodes = iter(rest), ctx.next_functions
        gate.take(saved, (x, w_gate, False), nodes)
        up.take(saved, (x, w_up, False), (nodes[0], nodes[2]))
        # The gradient of the product is wanted where one of these is.
        wanted = next((node for node in nodes[:3] if node[0] is not None and computes(node[0])), nodes[0])
        down.take(saved, (x or w_gate or w_up, w_down, bias), (wanted, *nodes[3:]))
        product = GatedProduct(g, u, parts, ctx.activation)
        _, dw_down, db, _ = Multiplication.backward(down, dy, product.backward)
        dx = dw_gate = dw_up = None
        if product.made:
            dx, dw_up, *_ = Multiplication.backward(up, u, _arrived(product.made[1]))
            also, dw_gate, *_ = Multiplication.backward(gate, g, _arrived(product.made[0]))
            if dx is None or also is None:
                dx = also if dx is None else dx
            else:
                dx.add_(also)
        for part in parts:
            part.give()
        return dx, dw_gate, dw_up, dw_down, db, None, None
