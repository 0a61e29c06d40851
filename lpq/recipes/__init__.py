"""Recipes and policies: which quantizer each operand gets, in which layer, at which step. Frozen data."""

from lpq.recipes.errors import PluginRecipeError, RecipeError, RecipeWarning
from lpq.recipes.gemms import Gemm, Recipe
from lpq.recipes.policy_sources import Include, PolicyLike, policy
from lpq.recipes.recipe_sources import RecipeLike, recipe
from lpq.recipes.rules import Policy, Rule, Schedule, Steps

__all__ = [
    "Gemm",
    "Include",
    "PluginRecipeError",
    "Policy",
    "PolicyLike",
    "Recipe",
    "RecipeError",
    "RecipeLike",
    "RecipeWarning",
    "Rule",
    "Schedule",
    "Steps",
    "policy",
    "recipe",
]
