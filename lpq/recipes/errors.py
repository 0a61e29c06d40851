"""Errors in a recipe or a policy, with their place: each function that reads a part puts its place in front."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lpq.registry.errors import LpqError


class RecipeError(LpqError, ValueError):
    """A recipe or a policy that cannot be built."""


class UnknownKey(RecipeError):
    """A key that no recipe, or no policy, has."""


class PluginRecipeError(RecipeError):
    """A recipe of a plugin that cannot be built. Everything else that the plugin brings is unaffected."""


class RecipeWarning(UserWarning):
    """A recipe or a policy is understood, but may not be what the user meant."""


@contextmanager
def place(name: str) -> Iterator[None]:
    """Turn an error raised inside into a ``RecipeError`` whose message starts with ``name``."""
    try:
        yield
    except RecipeError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    except LpqError as error:
        raise RecipeError(f"{name}: {error}") from error
