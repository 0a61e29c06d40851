"""Layers that a policy leaves out whatever its rules say: by a part of their name, as heads, or as too small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from lpq.nn.linear import Layer, weight_of
from lpq.nn.names import plain_name
from lpq.nn.transposed import holds_transposed
from lpq.recipes import Policy
from lpq.recipes.globs import matches, matching
from lpq.recipes.rules import HEAD


def exclusions(model: nn.Module, names: Mapping[str, Sequence[str]], policy: Policy) -> dict[str, str]:
    """The layers of ``model`` that are left out, by name, and why. ``names``: all names of each module."""
    plain_names = {name: [plain_name(alias) for alias in aliases] for name, aliases in names.items()}
    modules = {name: model.get_submodule(name) for name in names}
    weights = {n: [*weight_of(m).shape[-2:]] for n, m in modules.items() if convertible(m)}
    small = {name for name, shape in weights.items() if min(shape) < policy.least}  # shapes of one expert
    large = [alias for name in weights if name not in small for alias in plain_names[name]]
    patterns = {pattern for rule in policy.rules if rule.recipe is not None for pattern in rule.match} if small else ()
    of_small_alone = [pattern for pattern, hits in matching(patterns, large).items() if not hits]
    why: dict[str, str] = {}
    heads = _heads(model) if HEAD in policy.leave else set()
    for name, aliases in plain_names.items():
        parts = [part for alias in aliases if (part := policy.left_by(alias)) is not None]
        other = "; include='all' does not" if name in weights else ""
        if parts:
            why[name] = f"the policy leaves out {parts[0]!r}{other}"
        elif modules[name] in heads:
            why[name] = f"the policy leaves out {HEAD!r}, and the model says that this is its head{other}"
        elif name in small and not any(matches(pattern, alias) for pattern in of_small_alone for alias in aliases):
            why[name] = (
                f"a weight of {weights[name]}, and below {policy.least} there is nothing to gain; a rule that matches "
                "such layers only, or include='all', converts it"
            )
    return why


def _heads(model: nn.Module) -> set[nn.Module]:
    """The modules that models of Hugging Face name as their output embeddings, and the modules inside; linear layers
    with an output for each of a model's labels, as ViT's ``classifier``, or one more for none, as DETR's; and, where
    one of these lies beside the blocks, all linear layers there, as BERT's and RoBERTa's."""
    heads: set[nn.Module] = set()
    for module in model.modules():
        output_embeddings: Any = getattr(module, "get_output_embeddings", None)
        if callable(output_embeddings):
            labels = getattr(getattr(module, "config", None), "num_labels", None) or -1
            beside, blocks = [*module.children()], getattr(module, "base_model", None)
            if apart := any(child is blocks for child in beside):
                beside = [m for child in beside if child is not blocks for m in child.modules()]
            linear = [m for m in beside if isinstance(m, nn.Linear)]
            heads.update(m for m in linear if m.out_features in (labels, labels + 1))
            with suppress(AttributeError, NotImplementedError):  # of a model that has none
                heads.update(output_embeddings().modules())
            heads.update(linear if apart and not heads.isdisjoint(beside) else ())
    return heads


def convertible(module: nn.Module) -> bool:
    """Whether lpq itself converts modules of this class."""
    return type(module) is nn.Linear or isinstance(module, Layer) or holds_transposed(module)
