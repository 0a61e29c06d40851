"""Replays of a step: forward and backward once more from the same batch, with the same random bits and states, and with
other recipes for some layers. Afterwards all is as before: recipes, states, gradients, random bits.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lpq.formats.format import DIRECTIONS, Quantizer
from lpq.nn.cached_weight import write_stamp
from lpq.nn.eagerly import run_eagerly
from lpq.nn.first_argument import check_model
from lpq.nn.observing import unobserved
from lpq.nn.plan import Plan
from lpq.nn.stateful_layer import StatefulLayer, give_recipes, stateful_layers
from lpq.observe.readings import NO_VALUES, NumericsError
from lpq.observe.sharing import device_of, is_shared, refuse_inside
from lpq.recipes import Recipe
from lpq.registry.showing import brief, listed
from lpq.torch_private.tensors import base_of, local_part

Closure = Callable[[], Any]
"""Runs forward and backward of the step's batch, and returns the loss."""


def gradient_norm(model: nn.Module) -> Tensor:
    """The norm of the gradients that a model has, of all their shards. Torch adds up gradients of one mesh only."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms = [nn.utils.get_total_norm(gradients) for gradients in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


def apart(gradient: Tensor) -> Tensor:
    """The gradient, copied where it lies in memory that every backward writes to, as in the buckets of a
    ``DistributedDataParallel``."""
    return gradient if base_of(gradient) is None else gradient.clone()


@contextmanager
def kept_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Begin inside without gradients; put those that parameters have now back behind it."""
    kept = [(p, p.grad, p.grad if p.grad is None else apart(p.grad)) for p in parameters]
    try:
        for parameter, *_ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient, values in kept:
            if gradient is not None and values is not None and values is not gradient:
                gradient.copy_(values)
            parameter.grad = gradient


class Bits(NamedTuple):
    """The states of the generators that a step may draw from."""

    python: Any
    """The state of ``random``, by which some models leave out layers or mask inputs."""
    numpy: Any
    """The state of ``numpy.random``; None: nobody imported NumPy."""
    cpu: Tensor
    gpus: dict[torch.device, Tensor]
    """The states of the GPUs that hold a part of the model."""


class Before:
    """The random bits and the buffers of a model before a step, states of its quantizers among them: with the weights
    and the batch, all that the step depends on. Make it where the step begins: ``lpq.observe.Before(model)``."""

    def __init__(self, model: nn.Module) -> None:
        check_model(model)
        self.layers = {*stateful_layers(model).values()}
        self._notes = [(layer, layer.passes.fresh, layer.passes.borrowed) for layer in self.layers]
        devices = {device_of(p) for p in model.parameters()}
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._bits = self.bits()
        self._buffers = [
            (module, name, buffer, local_part(buffer).clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self._recipes = {layer: (layer.recipe, layer.state_buffers()) for layer in self.layers}

    @torch.no_grad()
    def restore(self) -> None:
        """Bring them back, as the very tensors that they were: a CUDA graph writes to these. A layer that has another
        recipe now gets the states of the operands that are as before."""
        self.set_bits(self._bits)
        had = set[tuple[nn.Module, str]]()
        for module, name, buffer, value in self._buffers:
            if isinstance(now := getattr(module, name, None), Tensor) and now.shape == buffer.shape:
                if now is not buffer:
                    setattr(module, name, buffer)
                local_part(buffer).copy_(value)
                had.add((module, name))
        values = {(module, name): value for module, name, _, value in self._buffers}
        for layer, (recipe, buffers) in self._recipes.items():
            if recipe is None or layer.recipe is None or layer.recipe == recipe:
                continue
            names = {(one.stack, one.tensor, one.key): one.name for one in buffers}
            for one in layer.state_buffers():
                keys = _keys_of_same(getattr(recipe, one.tensor), getattr(layer.recipe, one.tensor))
                if one.key in keys:
                    name = names[one.stack, one.tensor, keys[one.key]]
                    local_part(getattr(layer, one.name)).copy_(values[layer, name])
                    had.add((layer, one.name))
        for layer, fresh, borrowed in self._notes:
            known = {one.tensor for one in layer.state_buffers() if (layer, one.name) in had} - {*fresh}
            plan = layer.passes.plan
            layer.passes.fresh = () if plan is None else tuple(x for x in plan.fresh if x not in known)
            layer.passes.borrowed = tuple(name for name in borrowed if (layer, name) in had)
            layer.watch_fresh()

    def bits(self) -> Bits:
        """The state of the generators."""
        gpus = {device: torch.cuda.get_rng_state(device) for device in self._gpus}
        numpy = sys.modules.get("numpy")
        return Bits(random.getstate(), numpy and numpy.random.get_state(), torch.get_rng_state(), gpus)

    def set_bits(self, bits: Bits) -> None:
        """Set the state of the generators."""
        random.setstate(bits.python)
        if bits.numpy is not None:
            sys.modules["numpy"].random.set_state(bits.numpy)
        torch.set_rng_state(bits.cpu)
        for device, state in bits.gpus.items():
            torch.cuda.set_rng_state(state, device)


def _keys_of_same(before: Quantizer, now: Quantizer) -> dict[str, str]:
    """The key in the state of one quantizer for each key in the state of another, where operands are encoded alike.
    Where one direction is, and the other is not, they have other names."""
    of = {(d, q): p for p, q in before.state_branches().items() for d in DIRECTIONS if p in ("", f"{d}_")}
    branches = [(d, q, p) for p, q in now.state_branches().items() for d in DIRECTIONS if p in ("", f"{d}_")]
    return {p + s.name: of[d, q] + s.name for d, q, p in branches if (d, q) in of for s in q.state}


class Replay:
    """The step of a model, which can be run again."""

    def __init__(self, model: nn.Module, closure: Closure, before: Before | None) -> None:
        self._closure, self._before = closure, Before(model) if before is None else before
        if not self._before.layers >= {*stateful_layers(model).values()}:
            raise NumericsError(
                f"before= is of another model than {type(model).__name__}, or of this one before its layers were "
                "replaced: make lpq.observe.Before(model) where the step begins"
            )
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.layers = {m: m.recipe for m in stateful_layers(model).values() if m.recipe is not None}
        """The layers that have a recipe, with these."""
        self._model, self._is_shared = model, is_shared(model)
        self.in_main_grad = {m.model for m in self.layers if m.model.accumulate == "main_grad"}
        """The models that add gradients of weights to tensors of the user, which keep what the step added."""
        self.draws = any(Plan.of(recipe).stochastic for recipe in self.layers.values())
        """Whether a layer draws random bits, which it does not in bf16."""
        self.aligns = True
        """Whether each layer begins with the bits with which it began in the first run, whatever others draw, and how
        many. That takes hooks, with which fused layers run one by one."""
        self._bits: dict[tuple[int, int], Bits] = {}
        """The bits with which each layer began and ended in the first run, by its calls."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have runs inside, of which no observer of the step is told; put all back behind them."""
        now = Before(self._model)
        with kept_gradients(self.parameters), unobserved(self._before.layers):
            try:
                for one in self.in_main_grad:
                    one.accumulate = "grad"
                yield
            finally:
                for one in self.in_main_grad:
                    one.accumulate = "main_grad"
                give_recipes(self.layers)
                now.restore()

    def run(self, recipes: Mapping[StatefulLayer, Recipe]) -> tuple[float, list[Tensor]]:
        """Run the step with these recipes for these layers; return the loss and this rank's parts of the gradients."""
        wanted = {**self.layers, **recipes}
        give_recipes(wanted)
        self._before.restore()
        stamps = [write_stamp(p)[:2] for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        calls: dict[int, int] = {}
        with ExitStack() as stack:
            stack.enter_context(run_eagerly())
            stack.callback(register_optimizer_step_pre_hook(self._refuse_step).remove)
            stack.callback(self._model.register_forward_pre_hook(self._refuse_inside).remove)
            for layer in self.layers if self.aligns else ():
                for hook in self._hooks(layer, calls):
                    stack.callback(hook.remove)
            loss = self._closure()
        if others := [layer.title for layer, recipe in wanted.items() if layer.recipe != recipe]:
            raise NumericsError(
                f"the closure of a replay gives other recipes to {listed(others)}, as lpq.set_step and lpq.convert do, "
                "so no replay would be by the recipes that are tried: call that before. The closure runs forward and "
                "backward alone"
            )
        if stamps != [write_stamp(p)[:2] for p in self.parameters]:
            raise NumericsError(
                "the closure of a replay writes to weights, so each replay would train the model: it runs forward and "
                "backward alone"
            )
        zero = torch.zeros((), dtype=torch.float32)
        gradients = [zero if p.grad is None else local_part(p.grad).detach().clone() for p in self.parameters]
        if not isinstance(loss, Tensor | int | float) or (isinstance(loss, Tensor) and loss.numel() != 1):
            given = f"a tensor of shape {[*loss.shape]}" if isinstance(loss, Tensor) else brief(loss)
            raise NumericsError(
                f"the closure of a replay returned {given}: it must return the loss of the step, a number"
            )
        if isinstance(loss, Tensor) and loss.is_meta:
            raise NumericsError(f"the loss of a replay {NO_VALUES}")
        return float(loss.detach() if isinstance(loss, Tensor) else loss), gradients

    def _refuse_step(self, optimizer: Optimizer, *_: object) -> None:
        ours = {id(parameter) for parameter in self.parameters}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise NumericsError(
                "the closure of a replay steps an optimizer, so each replay would train the model: it runs forward and "
                "backward alone, and no hook of a gradient may step an optimizer either"
            )

    def _refuse_inside(self, *_: object) -> None:
        refuse_inside("the replay", self._is_shared)

    def _hooks(self, layer: StatefulLayer, calls: dict[int, int]) -> Iterator[Any]:
        def align(*_: Any) -> None:
            number = calls[id(layer)] = calls.get(id(layer), 0) + 1
            bits = self._bits.setdefault((id(layer), number), self._before.bits())
            self._before.set_bits(bits)

        yield layer.register_forward_pre_hook(align)
        yield layer.register_forward_hook(align)
