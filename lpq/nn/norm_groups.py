"""The layers behind a norm: those that take its output in one encoding, and those that encode it by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from lpq.nn.linear import Layer
from lpq.nn.plan import Plan
from lpq.torch_private.compiling import COMPILED_CALL

Place = tuple[nn.Module, str]
"""A module, and the name of its child."""


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


def encode_alone(places: Sequence[Place], layers: Sequence[Layer]) -> list[Layer]:
    """The layers that encode the output by themselves, of those at these places. They remember inputs, and are
    compiled, alone or with the module around them: compiled code cannot tell by whose state an input was encoded, and
    so moves a state of its own."""
    return [
        layer
        for (module, _), layer in zip(places, layers, strict=False)
        if (COMPILED_CALL in vars(module) or COMPILED_CALL in vars(layer))
        and any(memory.tensor == "x" for memory in layer.state_buffers())
    ]
