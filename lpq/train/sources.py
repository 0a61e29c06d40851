"""The recipe or the policy of a run: ``--recipe`` takes a recipe, ``--policy`` a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lpq
from lpq.recipes import RecipeError, toml

if TYPE_CHECKING:
    from lpq.recipes import Policy
    from lpq.train.config import TrainConfig


def policy_of(config: TrainConfig) -> Policy:
    """The policy of a run: the one that it names, or its recipe for all layers."""
    if config.policy is not None:
        return lpq.policy(config.policy)
    refuse_rules(config.recipe, f"give it as --policy {config.recipe}")
    return lpq.policy(lpq.recipe(config.recipe))


def refuse_rules(source: str, remedy: str) -> None:
    """Raise an error if ``source`` is a policy's file where a recipe is wanted."""
    path = toml.path(source)
    if path is not None and "rules" in toml.read(path):
        raise RecipeError(f"{path} is a policy and not a recipe, since this file has rules: {remedy}")
