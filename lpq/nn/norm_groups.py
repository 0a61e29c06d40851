"""The layers behind a norm: some take its output in one encoding, and others encode it by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

from torch import nn

from lpq.nn.linear import Layer
from lpq.nn.plan import Plan
from lpq.nn.unwrapping import children_inside, inside_of
from lpq.torch_private.compiling import COMPILED_CALL, compiled_from
from lpq.torch_private.hooks import may_see_input

Place = tuple[tuple[nn.Module, str, nn.Module], ...]
"""The way from the block of a norm down to a layer: at each step a module, the name of its child, and that child,
without wrappers of torch, which may be put around it, or leave, at any time."""
MOVED = "a layer that took its output was replaced since, or a module around that layer: call lpq.fuse again"
HOOKED = "a forward hook looks at its output, or is called with a module that gets it"
REPLACED = "its forward was replaced on the object since, and may compute something else: call lpq.fuse without that"
REPLACED_BEHIND = "the forward of a module that gets its output was replaced on the object: take that away"
ELSEWHERE = "it is no child of its block any more, as where another module was put around it: call lpq.fuse again"


class ConsumerGroup(NamedTuple):
    """The layers behind a norm that take its output in one encoding."""

    plan: Plan
    """The plan of the first of them."""
    at: tuple[int, ...]
    """Their places among the consumers of the norm."""
    col: bool
    """Whether backward needs the column operand."""
    later: bool = False
    """Whether backward makes it, as all that need it have ``x.save=input``."""


def groups_of(plans: Sequence[Plan | None], trained: Sequence[bool]) -> list[ConsumerGroup]:
    """The groups of layers with these plans. The others take the output in high precision: they have no recipe, or make
    of each input an encoding of their own. ``trained``: for each layer whether backward needs the gradient of its
    weight."""
    by_text: dict[str, list[tuple[int, Plan]]] = {}
    for i, plan in enumerate(plans):
        if plan is not None and (plan.shares or ("x" in plan.moving and not plan.draws_for_x)):
            by_text.setdefault(plan.x.text, []).append((i, plan))
    groups = []
    for members in by_text.values():
        keeps, plan = [of.keeps_input for i, of in members if trained[i]], members[0][1]
        later = bool(keeps) and all(keeps) and "x" not in plan.remembered
        groups.append(ConsumerGroup(plan, tuple(i for i, _ in members), bool(keeps), later))
    return groups


def places_in(block: nn.Module, above: Place = ()) -> Iterator[Place]:
    """The places of all modules in a block."""
    for name, child in children_inside(block).items():
        if child is not None:
            place = (*above, (block, name, child))
            yield place
            yield from places_in(child, place)


def encode_alone(places: Sequence[Place], layers: Sequence[Layer]) -> list[Layer]:
    """The layers, at these places if any, that encode the output by themselves. They remember inputs, and are compiled,
    alone or with modules around them: compiled code cannot tell by whose state an input was encoded, and so moves a
    state of its own. It would be compiled anew after each pass that is not compiled and has them share one."""
    alone = []
    for i, layer in enumerate(layers):
        compiled = layer.passes.moved_by_graph
        for module, name, child in places[i] if i < len(places) else ():
            now = module._modules.get(name)
            within = now is not child and now is not None and compiled_from(now) is not None
            compiled = compiled or within or COMPILED_CALL in vars(child)
        alone += [layer] if compiled and any(memory.tensor == "x" for memory in layer.state_buffers()) else []
    return alone


def why_another(now: nn.Module | None, child: nn.Module) -> str | None:
    """Why no layer is given an encoded input where a module stands that is not ``child``; None if torch has wrapped
    ``child``, and nobody looks at the input of that wrapper."""
    while now is not child:
        if now is None or (inside := inside_of(now)) is None:
            return MOVED
        if may_see_input(now):
            return HOOKED
        now = inside
    return None


class BeforeLayers(nn.Module):
    """A norm that knows the layers which take its output."""

    consumers: tuple[Layer, ...] = ()
    """The layers that take the output encoded. They are no submodules."""
    serves_others: bool = False
    """Whether something else takes the output, too: it gets the output in high precision, from the same run."""
    places: tuple[Place, ...] = ()
    """Where each of them was found, if it was; the norm encodes as long as it is there, as an adapter around it would
    take the output as well."""

    @property
    def block(self) -> nn.Module | None:
        """The module in which ``lpq.fuse`` found the norm; None: the norm's author has named the layers."""
        return self.places[0][0][0] if self.places else None

    def in_block(self) -> bool:
        """Whether the norm is a child of its block, perhaps in a wrapper of torch."""
        return self.block is not None and self in children_inside(self.block).values()

    @property
    def groups(self) -> list[ConsumerGroup]:
        """The layers that take its output encoded, by what they take."""
        alone = encode_alone(self.places, self.consumers)
        plans = [None if layer in alone else layer.passes.plan for layer in self.consumers]
        return groups_of(plans, [True] * len(plans))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the norm alone, such as PEFT trains, has no layers to encode for, and does not copy them."""
        memo[id(self)] = twin = copy(self)
        if self.block is not None and id(self.block) not in memo:
            vars(twin).update(consumers=(), places=(), serves_others=False)
        vars(twin).update(deepcopy(vars(twin), memo))
        return twin
