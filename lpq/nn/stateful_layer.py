"""Converted modules: each has a recipe, and what its quantizers remember in buffers beside its weights.

They also note that they ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from lpq import recipes
from lpq.distributed.alike import Comparison
from lpq.distributed.model_check import ModelCheck
from lpq.distributed.recipe_changes import withhold
from lpq.nn.converted_model import ConvertedModel
from lpq.nn.extended import Extension, clashes, extend
from lpq.nn.fresh_states import FreshStates, still_fresh
from lpq.nn.names import plain_name
from lpq.nn.passes import Passes
from lpq.nn.plan import LayerBuffer, Plan, check_names
from lpq.recipes import Recipe, RecipeLike, Schedule
from lpq.recipes.gemms import TENSORS
from lpq.registry.former_names import former_attribute
from lpq.registry.showing import listed
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import Gathered
from lpq.torch_private.compiling import is_exporting, once_when_traced
from lpq.torch_private.hooks import hang_again
from lpq.torch_private.tensors import local_part


class StatefulLayer(nn.Module):
    """A module with a recipe, and with buffers of its quantizers, which are fp32 whatever the weights are cast to."""

    kind: ClassVar[str]
    """The class in messages."""
    owners: ClassVar[tuple[str, ...]] = TENSORS
    """The beginnings of the names of all buffers that recipes add to this module."""
    transposed: bool = False
    """Whether its matrices are ``[in, out]``."""
    model: ConvertedModel
    """All that it has in common with other layers."""
    passes: Passes
    """The recipe by which it runs, and what a pass leaves for the next."""
    schedule: Schedule | None = None
    """The recipe of each step, under a policy; see ``lpq.set_step``."""
    qualified_name: str = ""
    """Its name in the model that was converted, for error messages."""

    def begin(self) -> None:
        """Set the attributes of a layer, without a recipe."""
        self.model, self.passes = ConvertedModel(), Passes()

    @classmethod
    def adopt(cls, module: nn.Module, recipe: RecipeLike | None) -> Self:
        """Turn this very module into a layer of this class: parameters, hooks and references to it stay."""
        cls.check_names(module, f"a {type(module).__name__}")
        if issubclass(cls, Extension):
            extend(module, cls)
        else:
            module.__class__ = cls
        assert isinstance(module, cls)
        module.begin()
        module.recipe = recipe
        return module

    @classmethod
    def check_names(cls, module: nn.Module, title: str) -> None:
        """Refuse a module that would lose attributes as a layer of this class."""
        if names := clashes(module, cls):
            raise ValueError(
                f"{title}: its {listed(names)} would be lost, as a layer of lpq has attributes of such names: rename "
                "yours, or have the policy give the layer no recipe"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Give a copy passes of its own, as a shallow copy, too, may get another recipe. They are fresh by the values
        here: a pickle may have none of the copy's yet where it has its passes."""
        passes = copy(self.passes)
        (passes.fresh,) = still_fresh([self])
        return {**super().__getstate__(), "passes": passes}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy, or of what is loaded from a pickle."""
        if "passes" not in state:
            raise RuntimeError(
                f"layer {state.get('qualified_name', '')}: another version of lpq pickled it, and only that version "
                "loads a model that was pickled whole: save model.state_dict() there, then call lpq.convert and "
                "model.load_state_dict here"
            )
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.watch_fresh()

    def join(self, model: ConvertedModel) -> None:
        """Make it a layer of this model."""
        self.model = model
        self.passes.forget()
        self.watch_fresh()

    @property
    def title(self) -> str:
        """Its name in messages. A compiler that reads it compiles each layer anew, and no more than eight: so only what
        raises an error reads it there."""
        return f"layer {self.qualified_name}, {self.sized}" if self.qualified_name else self.sized

    def __dir__(self) -> list[str]:
        """Without the former name below, which warns: torch.jit.trace reads whatever is listed."""
        return [name for name in super().__dir__() if name != "place"]  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> Self:
        """Refuse ``torch.jit.script``, which asks each module for the module to compile."""
        raise RuntimeError(
            f"{self.title}: torch.jit.script compiles no layer of lpq: use torch.export.export, or script "
            "lpq.restore(model)"
        )

    place = former_attribute("layer.place", "qualified_name")

    @property
    def sized(self) -> str:
        """Its class, with its sizes if it has one weight."""
        return self.kind

    @property
    def recipe(self) -> Recipe | None:
        """The recipe; assign a name, a string or a ``Recipe`` to change it. Weights and optimizer state stay."""
        return self.passes.recipe

    @recipe.setter
    def recipe(self, source: RecipeLike | None) -> None:
        give_recipes({self: recipes.recipe(source) if source is not None else None})

    def planned(self, recipe: Recipe | None) -> Plan | None:
        """Return the plan of a recipe; an error if this layer cannot have it."""
        if recipe is None:
            return None
        plan = Plan.of(recipe)
        if (why := self.why_unfit(plan)) is not None:
            raise ValueError(f"{self.title} cannot have the recipe {recipe.title}: {why}")
        check_names(self, recipe, self.memories(), self.title)
        return plan

    def take_recipe(self, recipe: Recipe | None) -> None:
        """Take a recipe without other ranks, which compare it with theirs afterwards."""
        self.passes.withheld = ""
        if recipe == self.recipe:
            return
        plan = self.planned(recipe)
        for name in self.memories():
            delattr(self, name)
        self.passes.recipe, self.passes.plan, self.passes.borrowed = recipe, plan, ()
        self.passes.forget()
        self.model.compare_again()
        with torch.inference_mode(False):  # whose tensors no later step could move
            for memory in self.state_buffers():
                fresh = getattr(plan, memory.tensor).new_state(next(self.parameters()).device)
                self.register_buffer(memory.name, self.place_for(fresh[memory.key]))
        self.passes.fresh = plan.fresh if plan is not None else ()
        self.watch_fresh()

    def why_unfit(self, plan: Plan) -> str | None:
        """Why this layer cannot do what a recipe plans; None if it can."""
        return None

    def shared_weight(self) -> Tensor:
        """Return the weight, as ranks share it."""
        return next(self.parameters())

    def place_for(self, memory: Tensor) -> Tensor:
        """The buffer in which the layer keeps this fresh state of a quantizer."""
        return memory

    @once_when_traced
    def note_pass(self, traced: bool, shared: bool = False) -> bool:
        """Note that a pass runs, or that a compiler traces one, which takes the answer as a constant. In a ``shared``
        one ranks send each other operands."""
        self.passes.traced, self.passes.ran = self.passes.traced or traced, self.passes.ran or not traced
        if not is_exporting():
            if traced and shared and self.model.check is not None:
                self.model.check.before_trace()
            if torch.is_grad_enabled():
                if traced:
                    self.passes.moved_by_graph = True
                    self.own_buffers()  # now, or the next pass would have another graph, which checkpointing runs again
                self.compare_in_pass(first=True)
        return True

    def compare_in_pass(self, first: bool) -> None:
        """Compare the model with the other ranks' in a pass of this layer; ``first``: the first one of its kind that
        trains."""
        if first and self.model.check is None:
            ModelCheck.give(self)
        if self.model.check is not None:
            self.model.check.in_pass()

    @property
    def stores_weight(self) -> bool:
        """Whether its weight is stored quantized."""
        weight = self._parameters.get("weight")
        return weight is not None and isinstance(local_part(weight), QuantizedTensor)

    def watch_fresh(self) -> None:
        """Have steps of optimizers end the time in which this layer has fresh states, if it has. No pass does so, as
        compiled code may be another layer's."""
        if not self.passes.fresh:
            return
        if self.model.fresh is None:
            self.model.fresh = FreshStates()
        self.model.fresh.add(self)

    def decide_fresh(self) -> None:
        """Find out which states are fresh: others may have filled them."""
        if self.passes.plan is not None and self.passes.plan.fresh:
            (self.passes.fresh,) = still_fresh([self])
            self.watch_fresh()

    def state_buffers(self) -> tuple[LayerBuffer, ...]:
        """The buffers of its present recipe."""
        return self.passes.plan.memories if self.passes.plan is not None else ()

    def memories(self) -> dict[str, Tensor]:
        """All that its quantizers remember across steps, by the names of the buffers."""
        return {memory.name: getattr(self, memory.name) for memory in self.state_buffers()}

    def states(self, stack: str = "") -> dict[str, dict[str, Tensor]]:
        """The state of each tensor that has one, by the keys of its quantizer; of a ``stack`` if there are several."""
        return states_of(self, [memory for memory in self.state_buffers() if memory.stack == stack])

    def own_buffers(self) -> None:
        """Give the layer buffers of its own in place of borrowed ones, before they are filled or moved one by one."""
        for name in self.passes.borrowed:
            with torch.inference_mode(False):  # an evaluation may be the first to need them
                setattr(self, name, getattr(self, name).clone())
        self.passes.borrowed = ()

    def static_values(self) -> dict[str, Tensor]:
        """The buffers that no step moves: ``lpq.calibrate`` finds their values."""
        return {memory.name: getattr(self, memory.name) for memory in self.state_buffers() if not memory.moves}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # No two keys share memory: safetensors refuses that, and loads would mix them up.
        for name in self.passes.borrowed:
            destination[prefix + name] = destination[prefix + name].clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.own_buffers()
        for name, memory in self.memories().items():
            value = state_dict.pop(prefix + name, None)
            if value is not None and value.shape == memory.shape:  # not another recipe's, of more steps or fewer
                stays = type(value) is type(memory) and value.device == memory.device  # a backward may yet move it
                state_dict[prefix + name] = memory.copy_(value) if stays else value.to(memory.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing, unexpected = args[2:4]
        memories = {prefix + name: memory for name, memory in self.memories().items()}
        # A file of other layers alone, such as another shard or adapters, leaves what this one remembers.
        named = any(key.startswith(prefix) and key not in memories for key in state_dict)
        for key in memories.keys() & missing:
            missing.remove(key)
            if named:
                name, memory, device = key[len(prefix) :], memories[key], next(self.parameters()).device
                setattr(self, name, torch.zeros_like(memory, device=device) if memory.is_meta else memory.zero_())
        self.passes.forget()
        self.decide_fresh()
        others = tuple(f"{prefix}{owner}_" for owner in self.owners)
        unexpected[:] = [k for k in unexpected if not k.startswith(others) or "." in k[len(prefix) :]]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.own_buffers()
        state = self.memories()

        def still_stored(t: Tensor) -> Any:
            own, new = local_part(t), local_part(applied := fn(t))
            if isinstance(own, QuantizedTensor) and not isinstance(new, QuantizedTensor):
                raise TypeError(
                    f"{self.title}: its weight is stored as {own.quantizer}, which stands for no {new.dtype}: cast the "
                    f"rest of the model back to {own.dtype}; or make it an ordinary weight before, by layer.weight = "
                    "nn.Parameter(layer.weight.dequantize())"
                )
            return applied

        prepared = [(p, cast("Any", p).given()) for p in self._parameters.values() if isinstance(p, Gathered)]
        super()._apply(still_stored, recurse)  # type: ignore[no-untyped-call]
        for parameter, given in prepared:  # torch has put another tensor in it, with attributes of its own
            vars(parameter).update(given)
            hang_again(parameter)
        for name, before in state.items():  # .to(torch.bfloat16) is meant for the weights
            device = getattr(self, name).device
            setattr(self, name, torch.zeros_like(before, device=device) if before.is_meta else before.to(device))
        return self


def stateful_layers(model: nn.Module) -> dict[str, StatefulLayer]:
    """The layers of lpq in a model, and experts in stacks, by plain names; by the whole where another module has it."""
    own = dict(model.named_modules())
    return {p if own.get(p := plain_name(n), m) is m else n: m for n, m in own.items() if isinstance(m, StatefulLayer)}


def give_recipes(by_layer: Mapping[StatefulLayer, Recipe | None]) -> None:
    """Give layers recipes, or none if one of them cannot have its own. Layers whose ranks do not all come with a change
    keep theirs (``lpq/distributed/recipe_changes.py``)."""
    changes = {layer: recipe for layer, recipe in by_layer.items() if layer.recipe != recipe}
    together: dict[StatefulLayer, Comparison] = {}
    for layer, recipe in changes.items():
        layer.planned(recipe)
        if (comparison := layer.model.changes_together(layer.shared_weight().device, layer.passes.traced)) is not None:
            together[layer] = comparison
    reasons: Mapping[StatefulLayer, str] = withhold(together, changes) if together else {}
    for layer, recipe in by_layer.items():
        if (words := reasons.get(layer)) is None:
            layer.take_recipe(recipe)
        else:
            layer.passes.withheld = words


def states_of(module: nn.Module, memories: Iterable[LayerBuffer]) -> dict[str, dict[str, Tensor]]:
    """The state of each tensor that these buffers are of, by the keys of its quantizer."""
    by_tensor: dict[str, dict[str, Tensor]] = {}
    for name, tensor, key, *_ in memories:
        by_tensor.setdefault(tensor, {})[key] = getattr(module, name)
    return by_tensor
