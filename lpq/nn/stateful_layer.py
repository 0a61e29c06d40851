"""Converted modules: each has a recipe, and what its quantizers remember in buffers beside its weights.

They also note that they ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lpq import recipes, registry
from lpq.nn.plan import Plan
from lpq.nn.quantizer_state import Memory, check_names
from lpq.recipes.gemms import TENSORS
from lpq.registry.warning import warn
from lpq.torch_private.compiling import is_exporting, once_when_traced

if TYPE_CHECKING:
    from lpq.distributed.model_check import ModelCheck
    from lpq.nn.accumulation import Accumulate
    from lpq.nn.stages import Stages
    from lpq.recipes import Recipe, RecipeLike, Schedule
    from lpq.tensor.observed import Observer


MOST_CALLS = 16
"""The number of bound calls that a layer keeps, one for each kind of pass."""


class StatefulLayer(nn.Module):
    """A module with a recipe, and with buffers of its quantizers, which are fp32 whatever the weights are cast to."""

    kind: ClassVar[str]
    """The class in messages."""
    qualified_name: str = ""
    """Its name in the model that was converted, for error messages."""
    transposed: bool = False
    """Whether its matrices are ``[in, out]``."""
    _recipe: Recipe | None = None
    _plan: Plan | None = None
    schedule: Schedule | None = None
    """The recipe of each step, under a policy; see ``lpq.set_step``."""
    stages: Stages | None = None
    """The step of the model, if the schedule has several recipes."""
    accumulate: Accumulate | None = None
    """The tensor to which backward adds the gradient of a weight in place: ``weight.grad``, if it is there, or
    ``weight.main_grad``, in its dtype. None: autograd gets the gradient, as it always does under
    ``torch.autograd.grad``."""
    observers: tuple[Observer, ...] = ()
    """Those that each pass tells of its tensors, inside of ``observing`` (``lpq/nn/observing.py``)."""
    owners: ClassVar[tuple[str, ...]] = TENSORS
    """The beginnings of the names of all buffers that recipes add to this module."""

    traced: bool = False
    """Whether a compiler has traced a pass. Compiled code notes nothing when it runs."""
    _ran: bool = False
    read_past: bool = False
    """Whether the pass of another module has read a weight of this one (``lpq/nn/read_past.py``)."""

    model_check: ModelCheck | None = None
    """The check that ranks have the same model, if lpq gathers none of its weights."""
    _calls: tuple[object, dict[object, Any]] = (None, {})
    """The epoch of the registry, and what was bound in it for passes of one kind, by all that it depends on: calls,
    steps, or ways over a mesh."""
    _checked: bool = False
    """Whether the static values passed their check."""

    @property
    def title(self) -> str:
        """Its name in messages. A compiler that reads it compiles each layer anew, and no more than eight: so only what
        raises an error reads it there."""
        return f"layer {self.qualified_name}, {self.sized}" if self.qualified_name else self.sized

    @property
    def place(self) -> str:
        """The former name of ``qualified_name``, for one version more."""
        warn("layer.place will be removed in the next version: it is layer.qualified_name now", DeprecationWarning)
        return self.qualified_name

    @property
    def sized(self) -> str:
        """Its class, with its sizes if it has one weight."""
        return self.kind

    @property
    def recipe(self) -> Recipe | None:
        """The recipe; assign a name, a string or a ``Recipe`` to change it. Weights and optimizer state stay."""
        return self._recipe

    @recipe.setter
    def recipe(self, source: RecipeLike | None) -> None:
        recipe = recipes.recipe(source) if source is not None else None
        if recipe == self._recipe:
            return
        plan = None
        if recipe is not None:
            plan = Plan.of(recipe)
            if (why := self.why_unfit(plan)) is not None:
                raise ValueError(f"{self.title} cannot have the recipe {recipe.title}: {why}")
            check_names(self, recipe, self.memories(), self.title)
        for name in self.memories():
            delattr(self, name)
        self._recipe, self._plan = recipe, plan
        self.forget_calls()
        self.compare_again()
        for memory in self.state_buffers():
            fresh = getattr(plan, memory.tensor).new_state(next(self.parameters()).device)
            self.register_buffer(memory.name, self.place_for(fresh[memory.key]))

    def why_unfit(self, plan: Plan) -> str | None:
        """Why this layer cannot do what a recipe plans; None if it can."""
        return None

    def place_for(self, memory: Tensor) -> Tensor:
        """The buffer in which the layer keeps this fresh state of a quantizer."""
        return memory

    def compare_again(self) -> None:
        """Have ranks compare the model once more, as a recipe has changed."""
        if self.model_check is not None:
            self.model_check.forget()

    @property
    def called(self) -> bool:
        """Whether a pass ran outside of compiled code."""
        return self._ran or bool(self._calls[1])

    @once_when_traced
    def note_pass(self, traced: bool, shared: bool = False) -> bool:
        """Note that a pass runs, or that a compiler traces one, which takes the answer as a constant. In a ``shared``
        one ranks send each other operands."""
        self.__dict__["traced" if traced else "_ran"] = True
        if not is_exporting():
            if traced and shared and self.model_check is not None:
                self.model_check.before_trace()
            if torch.is_grad_enabled():
                self.compare_in_pass(first=True)
        return True

    def compare_in_pass(self, first: bool) -> None:
        """Compare the model with the other ranks' in a pass that trains this layer; ``first``: the first one of its
        kind."""
        if first and self.model_check is None:
            from lpq.distributed.model_check import ModelCheck

            ModelCheck.give(self)
        if self.model_check is not None:
            self.model_check.in_pass()

    def state_buffers(self) -> tuple[Memory, ...]:
        """The buffers of its present recipe."""
        return self._plan.memories if self._plan is not None else ()

    def memories(self) -> dict[str, Tensor]:
        """All that its quantizers remember across steps, by the names of the buffers."""
        return {memory.name: getattr(self, memory.name) for memory in self.state_buffers()}

    def states(self, stack: str = "") -> dict[str, dict[str, Tensor]]:
        """The state of each tensor that has one, by the keys of its quantizer; of a ``stack`` if there are several."""
        return states_of(self, [memory for memory in self.state_buffers() if memory.stack == stack])

    def static_values(self) -> dict[str, Tensor]:
        """The buffers that no step moves: ``lpq.calibrate`` finds their values."""
        return {memory.name: getattr(self, memory.name) for memory in self.state_buffers() if not memory.moves}

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which nobody observes, and which no step of the model moves."""
        return {key: value for key, value in self.__dict__.items() if key not in ("observers", "stages", "_calls")}

    def forget_calls(self) -> None:
        """Check inputs and static values anew in the next pass."""
        self._ran = self.called
        self._calls, self._checked = (None, {}), False

    def bound_calls(self) -> dict[object, Any]:
        """Return what is bound for passes of one kind, with room for one more."""
        epoch, calls = self._calls
        if epoch is not registry.epoch():
            calls = {}
            self._calls = registry.epoch(), calls
        if len(calls) >= MOST_CALLS:
            oldest, *_ = calls  # at once, as other threads change them, too
            calls.pop(oldest, None)
        return calls

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, memory in self.memories().items():
            if prefix + name in state_dict and state_dict[prefix + name].shape != memory.shape:
                del state_dict[prefix + name]  # another recipe's, which remembers more steps or fewer
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing: list[str] = args[2]
        unexpected: list[str] = args[3]
        for name, memory in self.memories().items():
            if prefix + name in missing:
                missing.remove(prefix + name)
                device = next(self.parameters()).device
                fresh = memory.is_meta and device.type != "meta"
                setattr(self, name, torch.zeros_like(memory, device=device) if fresh else memory.zero_())
        self.forget_calls()
        others = tuple(f"{prefix}{owner}_" for owner in self.owners)
        unexpected[:] = [k for k in unexpected if not k.startswith(others) or "." in k[len(prefix) :]]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        state = self.memories()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in state.items():  # .to(torch.bfloat16) is meant for the weights
            device = getattr(self, name).device
            fresh = before.is_meta and device.type != "meta"
            setattr(self, name, torch.zeros_like(before, device=device) if fresh else before.to(device))
        return self


def states_of(module: nn.Module, memories: Iterable[Memory]) -> dict[str, dict[str, Tensor]]:
    """The state of each tensor that these buffers are of, by the keys of its quantizer."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor, key, *_ in memories:
        found.setdefault(tensor, {})[key] = getattr(module, name)
    return found
