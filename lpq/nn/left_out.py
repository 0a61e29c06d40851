"""Layers that a policy leaves out regardless of its rules: by a part of their name, or as too small for any gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from lpq.nn.linear import Layer
from lpq.nn.names import plain_name
from lpq.nn.transposed import holds_transposed
from lpq.recipes.globs import matches

if TYPE_CHECKING:
    from lpq.recipes import Policy


def left_out(model: nn.Module, names: Mapping[str, Sequence[str]], policy: Policy) -> dict[str, str]:
    """The layers of ``model`` that are left out, by name, and why. ``names``: all names of each module."""
    called = {name: [plain_name(alias) for alias in aliases] for name, aliases in names.items()}
    modules = {name: model.get_submodule(name) for name in names}
    layers = {name: cast("Any", module) for name, module in modules.items() if convertible(module)}
    weights = {name: [*layer.weight.shape[-2:]] for name, layer in layers.items()}  # of experts, that of one
    small = {name for name, shape in weights.items() if min(shape) < policy.least}
    large = [alias for name in weights if name not in small for alias in called[name]]
    named_patterns = _patterns_without(large, policy) if small else []
    why: dict[str, str] = {}
    for name, aliases in called.items():
        parts = [part for alias in aliases if (part := policy.left_by(alias)) is not None]
        if parts:
            other = "; include='all' does not" if name in layers else ""
            why[name] = f"the policy leaves out {parts[0]!r}{other}"
        elif name in small and not any(matches(pattern, alias) for pattern in named_patterns for alias in aliases):
            why[name] = (
                f"a weight of {weights[name]}, and below {policy.least} there is nothing to gain; a rule that matches "
                "such layers only, or include='all', converts it"
            )
    return why


def convertible(module: nn.Module) -> bool:
    """Whether lpq itself converts modules of this class."""
    return type(module) is nn.Linear or isinstance(module, Layer) or holds_transposed(module)


def _patterns_without(others: Sequence[str], policy: Policy) -> list[str]:
    """The patterns that give a recipe and match none of these layers."""
    patterns = dict.fromkeys(pattern for rule in policy.rules if rule.recipe is not None for pattern in rule.match)
    return [pattern for pattern in patterns if not any(matches(pattern, name) for name in others)]
