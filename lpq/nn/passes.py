"""Passes: the recipe by which the passes of one layer run, and the objects that a pass leaves for the next."""

from __future__ import annotations

from typing import Any

from lpq import registry
from lpq.nn.cached_weight import HeldWeight
from lpq.nn.plan import Plan
from lpq.nn.siblings import StaticValues
from lpq.recipes import Recipe
from lpq.tensor.observed import Observer

MOST_CALLS = 16
"""The number of bound calls that a layer keeps, one for each kind of pass."""


class Passes:
    """The passes of a layer. A copy has the recipe alone: nobody observes it, or releases a weight that it holds."""

    def __init__(
        self, recipe: Recipe | None = None, plan: Plan | None = None, traced: bool = False,
        borrowed: tuple[str, ...] = (), fresh: tuple[str, ...] = (), moved: bool = False,
    ) -> None:  # fmt: skip
        self.recipe, self.plan, self.borrowed = recipe, plan, borrowed
        """The names of the buffers that it shares with another layer, whose they are (``lpq/nn/shared_states.py``)."""
        self.fresh = fresh
        """The tensors whose empty states are not recalled (``lpq/nn/fresh_states.py``)."""
        self.withheld = ""
        """The recipe that this rank was to change to without the others, in words."""
        self.held_weight: HeldWeight | None = None
        """The encoded weight, from ``hold_weight`` to ``release_weight``, whether it is out of date or not."""
        self.observers: tuple[Observer, ...] = ()
        """The observers that each pass tells of its tensors, inside of ``observing`` (``lpq/nn/observing.py``)."""
        self.ran = False
        """Whether a pass was noted that ran outside of compiled code; see ``called``."""
        self.traced = traced
        """Whether a compiler has traced a pass. The compiled code notes nothing when it runs."""
        self.moved_by_graph = moved
        """Whether a compiler has traced a pass that trains, whose backward moves states of the layer's own."""
        self.read_past = False
        """Whether the pass of another module has read a weight of the layer (``lpq/nn/called.py``)."""
        self.calls: tuple[object, dict[object, Any]] = (None, {})
        """The epoch of the registry, and what was bound in it for passes of one kind, by all that it depends on: calls,
        steps, or ways over a mesh."""
        self.norms: dict[object, Any] = {}
        """The norms that functions encode by for this layer and others (``lpq/nn/norm_functions.py``)."""
        self.checked = False
        """Whether the static values passed their check."""
        self.static_input = StaticValues()

    @property
    def called(self) -> bool:
        """Whether a pass ran outside of compiled code."""
        return self.ran or bool(self.calls[1])

    def forget(self) -> None:
        """Bind calls, and check inputs and static values, anew in the next pass."""
        self.ran = self.called
        self.calls, self.checked, self.static_input = (None, {}), False, StaticValues()

    def bound_calls(self) -> dict[object, Any]:
        """Return the calls that are bound for passes of one kind, with room for one more."""
        if self.calls[0] is not registry.epoch():
            self.calls = registry.epoch(), {}
        _, calls = self.calls
        if len(calls) >= MOST_CALLS:
            oldest, *_ = calls  # at once, as other threads change them, too
            calls.pop(oldest, None)
        return calls

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, (self.recipe, self.plan, self.traced, self.borrowed, self.fresh, self.moved_by_graph)
