"""Linear: an ``nn.Linear`` whose three products multiply quantized operands.

fprop  y = x.row · w.row        dgrad  dx = dy.row · w.col        wgrad  dw = dy.col · x.col
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lpq import registry
from lpq.formats import Quantizer
from lpq.kernels.table import kernels_allowed
from lpq.nn import recomputed
from lpq.nn.cached_weight import HeldWeight, turn_of, weight_operands, write_stamp
from lpq.nn.encoded_inputs import Given, input_buffers
from lpq.nn.exported import forward_of
from lpq.nn.input_checks import check, check_accumulation, check_memories
from lpq.nn.multiply import LayerCall, Multiplication, Prepared, Within
from lpq.nn.observing import watch
from lpq.nn.plan import Plan
from lpq.nn.shared_states import EncodedBy, buffers_at_hand
from lpq.nn.stateful_layer import states_of
from lpq.nn.step import Shapes, bind_few
from lpq.nn.weighted_layer import WeightedLayer
from lpq.operations import encode_operands, remember
from lpq.operations.argument_checks import check_bias
from lpq.operations.binding import on_device
from lpq.operations.operators import ORDINARY, can_bypass_dispatcher
from lpq.operations.random_seeds import drawn, drawn_by_operator, with_one_turn
from lpq.recipes import RecipeLike
from lpq.recipes.gemms import TENSORS
from lpq.tensor import QuantizedTensor
from lpq.tensor.with_value import WithValue
from lpq.torch_private.compiling import is_exporting
from lpq.torch_private.dispatch import autocasts
from lpq.torch_private.distributed import active_replica
from lpq.torch_private.tensors import local_part

if TYPE_CHECKING:
    from lpq.distributed.weight_gather import Gather


class Layer(WeightedLayer):
    """``y = x Wᵀ + b`` with the three products of ``recipe``.

    It extends a class that does the same in high precision, with a matrix ``weight``, ``bias`` (or None),
    ``in_features`` and ``out_features``: derive a subclass of this and of that class, whose ``kind`` is its name in
    messages. With ``recipe=None`` it does what that class does. ``transposed``: the weight is ``[in, out]``.

    The state dict has the keys of that class. A recipe that remembers statistics across steps (delayed scaling) adds
    its buffers, ``x_…``, ``w_…`` and ``dy_…``. A checkpoint without them loads too, and starts them afresh; buffers
    of another recipe are ignored.
    """

    bias: nn.Parameter

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.gather is not None and self.model.fsdp is not None:
            self.model.fsdp.add(self)
        self.claim_weight()

    # ------------------------------------------------------------------------------ running it

    def forward(self, input: Tensor, within: Within | None = None) -> Tensor:
        """``within``: a function over several layers runs this pass. It gets what ``Prepared`` has, or None if
        something watches the pass, or traces it, which that function does not serve. If ``within.x``, the input gives
        its shape and dtype alone."""
        if self.model.stages is not None:
            self.model.stages.check(self)
        plan = self.passes.plan
        if plan is None:
            return super().forward(input)  # type: ignore[no-any-return]  # of the other base class
        weight: Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self.weight  # which a hook computes, or a parametrization
        if self.transposed:
            weight = weight.t()
        if type(input) in ORDINARY and not autocasts():
            return self._multiply(plan, input, weight, input.dtype, within)
        if not isinstance(input, Tensor):
            check(self, input, weight)
        given = by = None
        if isinstance(input, QuantizedTensor) and not hasattr(weight, "device_mesh"):
            traced, needs_dw = torch.compiler.is_compiling(), torch.is_grad_enabled() and weight.requires_grad
            encoded = input
            if not traced and isinstance(input, WithValue) and input.beside:
                encoded = input.encoded_as(plan.x)
            by = EncodedBy.own(self, encoded) if "x" in plan.remembered and not traced else None
            given = None if traced else buffers_at_hand(plan, input, encoded, needs_dw, by is not None)
            if given is None:
                other = encoded.quantizer.text != plan.x.text or (needs_dw and encoded.stored[1] is None)
                if isinstance(input, WithValue) and (not traced or other or "x" in plan.remembered):
                    return self.forward(input.expand(input.shape), within)  # the value, which autograd knows
                check(self, input, weight)
                given = *input_buffers(self, plan, input, needs_dw, by is not None), None
            if by is not None:
                by.take(self)
        device = input.device.type
        if not input.is_meta and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):  # it has no effect from here on, and would slow every operation
                return self._multiply(plan, input, weight, dtype, within, given, by)
        return self._multiply(plan, input, weight, input.dtype, within, given, by)

    def _multiply(
        self, plan: Plan, input: Tensor, weight: Tensor, dtype: torch.dtype, within: Within | None,
        given: Given | None = None, by: EncodedBy | None = None,
    ) -> Tensor:  # fmt: skip
        passes, bias = self.passes, self.bias
        held_weight = self.held_weight() if passes.held_weight is not None else None
        ordinary = type(weight) in ORDINARY or isinstance(weight, QuantizedTensor)
        first = input if given is None else given[0][0]
        if ordinary and can_bypass_dispatcher(first):
            encoded = given is not None or (within is not None and within.x)
            arrives = within is not None and within.dy
            call = self._bound(plan, input, weight, bias, dtype, held_weight is not None, encoded, arrives)
        elif hasattr(weight, "device_mesh") and (self.layouts is not None or hasattr(input, "device_mesh")):
            from lpq.nn.parallel import multiply_parts

            return multiply_parts(self, plan, input, weight, bias, dtype, self.with_all, within)  # type: ignore[arg-type, return-value]
        elif within is not None:
            return None  # type: ignore[return-value]
        else:
            check(self, input, weight)
            self.note_pass(torch.compiler.is_dynamo_compiling())
            inputs = self.model.inputs if plan.shares and can_bypass_dispatcher(input) else None
            shapes = self._shapes(input, weight, dtype, held_weight is not None, given is not None)
            title = "" if torch.compiler.is_compiling() else self.title
            call = LayerCall(plan, shapes, None, inputs=inputs, layer=0 if inputs is None else id(self), title=title)
        if plan.memories or plan.stochastic or call.shapes.encoded or self.gather is not None or self.model.accumulate:
            call = self.with_all(call, first, weight, held_weight)
        if given is not None:
            call = call._replace(input=given[:2], encoded_by=by, column=given[2])
        if passes.observers:
            call = call._replace(watch=watch(self))
        if within is not None:
            shapes = call.shapes
            return Prepared(weight, call, input, bias, (*input.shape[:-1], shapes.outputs))  # type: ignore[return-value]
        multiply: Any = Multiplication.apply
        if call.step is None and is_exporting():
            multiply = forward_of(Multiplication, self.title, weight)
        with on_device(call.shapes.device):
            y: Tensor = multiply(input, weight, bias, call)
        return y

    def _bound(
        self, plan: Plan, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, w_held: bool,
        x_encoded: bool, arrives: bool,
    ) -> LayerCall:  # fmt: skip
        """The call of a pass that bypasses the dispatcher; the first pass of its kind is checked and bound."""
        grad = torch.is_grad_enabled()
        try:
            key = (
                input.shape, input.dtype, input.layout, input.device, weight.shape, weight.dtype, weight.device,
                None if bias is None else (bias.shape, bias.dtype, bias.device), dtype,
                grad and input.requires_grad, grad and weight.requires_grad, type(weight), w_held, x_encoded,
                arrives, kernels_allowed(), self.passes.fresh,
            )  # fmt: skip
        except (AttributeError, RuntimeError):  # it has no shape
            check(self, input, weight)
            raise
        check_of_ranks = self.model.check
        if check_of_ranks is not None and check_of_ranks.open and grad:
            self.compare_in_pass(first=False)
        epoch, calls = self.passes.calls
        call: LayerCall | None = calls.get(key) if epoch is registry.epoch() else None
        if call is None:
            if self.passes.fresh and not (self.passes.called or self.passes.traced):
                self.decide_fresh()  # others may have filled its states
            calls = self.passes.bound_calls()
            check(self, input, weight)
            if check_of_ranks is None or not grad:
                self.compare_in_pass(first=grad)
            if bias is not None:
                check_bias(bias, self.out_features, input.device, self.title)
            shapes = self._shapes(input, weight, dtype, w_held, x_encoded)._replace(arrived=arrives)
            with on_device(shapes.device):
                inputs = self.model.inputs if plan.shares and not x_encoded else None
                step = bind_few(plan, shapes)
                call = calls[key] = LayerCall(plan, shapes, step, inputs=inputs, layer=id(self), title=self.title)
        return call

    def _shapes(self, input: Tensor, weight: Tensor, dtype: torch.dtype, w_held: bool, x_encoded: bool) -> Shapes:
        grad = torch.is_grad_enabled()
        features, outputs = input.shape[-1], weight.shape[0]
        rows = 1
        for size in input.shape[:-1]:
            rows *= size
        return Shapes(
            rows, features, outputs, input.dtype, weight.dtype, dtype, weight.dtype, input.device,
            grad and input.requires_grad, grad and weight.requires_grad, w_held or isinstance(weight, QuantizedTensor),
            x_encoded, torch.compiler.is_dynamo_compiling(), fresh=self.passes.fresh,
        )  # fmt: skip

    def with_all(
        self, call: LayerCall, input: Tensor, weight: Tensor, held_weight: HeldWeight | None = None
    ) -> LayerCall:
        """Return the call with the values that are new in each pass: seeds, states, the operands of the weight."""
        (plan, shapes), accumulate = call[:2], self.model.accumulate
        if accumulate is not None:
            check_accumulation(self, weight)
        draw = drawn_by_operator if call.step is None else drawn
        seeds = draw(input, weight, len(TENSORS)) if plan.stochastic else None
        if self.passes.borrowed and not (shapes.given or shapes.taken) and torch.is_grad_enabled():
            self.own_buffers()  # each layer that encodes for itself moves its state
        states = states_of(self, plan.memories) if plan.memories else {}
        if shapes.parts is not None:
            states = {name: {key: local_part(t) for key, t in state.items()} for name, state in states.items()}
        if plan.moving:
            if active_replica() is not None or torch.compiler.is_compiling():
                check_memories(self, {tensor: states[tensor] for tensor in plan.moving})
            recomputed.check(self)
        if (gather := self.gather) is not None and not torch.compiler.is_compiling():
            gather.note()
        measured = [s for s in gather.stats if s is not None] if gather is not None and "w" in states else ()
        operands = weight_operands(plan, weight, held_weight, shapes.needs_dx) if shapes.encoded else None
        if plan.turns and seeds is not None:
            seeds = with_one_turn(seeds, turn_of(plan.w, operands))
        static = self.passes.static_input.read(states["x"]) if call.inputs is not None and "x" in states else ()
        return call._replace(
            states=states, seeds=seeds, weight=operands, measured=measured, accumulate=accumulate, static=static
        )

    # ------------------------------------------------------------------------------ being sharded

    def weight_quantizer(self) -> Quantizer | None:
        """The quantizer of the weight at this step; None: the weight is not quantized."""
        return self.passes.plan.w if self.passes.plan is not None else None

    def weight_gather(self) -> Gather:
        """How the weight is gathered; FSDP2 uses it, once it shards the layer."""
        if self.gather is None or self.model.fsdp is None:
            raise RuntimeError(
                f"{self.title}: its weight was prepared by lpq.convert(…, weights=…) for another layer: have layers "
                "share a weight before lpq.convert, or give this one a weight of its own"
            )
        return self.model.fsdp.of(self)

    # ------------------------------------------------------------------------------ holding an encoded weight

    def hold_weight(self) -> None:
        """Encode the weight now, for every pass until ``release_weight``."""
        if (plan := self.passes.plan) is None:
            return
        if hasattr(self.weight, "device_mesh"):
            raise ValueError(
                f"{self.title}: hold_weights is for weights that are not sharded; FSDP2 keeps gathered ones for "
                "several passes by reshard_after_forward=False and set_reshard_after_backward(False)"
            )
        state, stats = self.states().get("w"), list[Tensor]()
        with torch.inference_mode(False), torch.no_grad():
            weight: Tensor = self.weight.t() if self.transposed else self.weight
            buffers = weight_operands(plan, self.weight, None, col=True)
            if buffers is None:
                memory = None if (fresh := "w" in self.passes.fresh) else state
                row, col, stats = encode_operands(plan.w, weight, col=not plan.w_at_use, state=memory, measures=fresh)
                assert row is not None
                buffers = row.tensors(), () if col is None else col.tensors()
        stamp, storage = write_stamp(self.weight), self.weight.detach()
        self.passes.held_weight = HeldWeight(*buffers, self.weight, plan.w, stamp, storage, stats)

    def release_weight(self) -> None:
        held, plan, self.passes.held_weight = self.passes.held_weight, self.passes.plan, None
        state = self.states().get("w")
        if held is not None and plan is not None and plan.w == held.quantizer and held.stats and state is not None:
            remember(plan.w, state, held.stats)

    def held_weight(self) -> HeldWeight | None:
        """The encoded weight; an error if it is out of date, which a compiled pass does not check."""
        weight, plan = self.passes.held_weight, self.passes.plan
        if weight is None or torch.compiler.is_compiling():
            return weight
        if plan is not None and not weight.is_of(self.weight, plan.w):
            if "weight" not in self._parameters:
                raise RuntimeError(
                    f"{self.title}: its weight is computed again before each pass, by a hook or a parametrization, and "
                    "cannot be held: leave lpq.hold_weights out, or enter torch.nn.utils.parametrize.cached() around "
                    "it, which keeps what parametrizations compute"
                )
            raise RuntimeError(
                f"{self.title}: the weight was changed while its encoded form is held, or has another format now; "
                "leave lpq.hold_weights before the optimizer's step, and before another recipe"
            )
        return weight

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.title if self.recipe else None}"


class Linear(Layer, nn.Linear):
    """``nn.Linear`` with the three products of ``recipe``; see ``Layer``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike | None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.begin()
        self.recipe = recipe


def weight_of(layer: Any) -> Any:
    """The weight; where a parametrization would compute it, a tensor without values, of its shape and sharded as it."""
    if nn.utils.parametrize.is_parametrized(layer, "weight") and not layer.transposed:
        like = layer.shared_weight()
        dtype = torch.double if like.dtype is torch.double else torch.float  # codes, too, are decoded to a float
        return like.new_empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
    return layer.weight
