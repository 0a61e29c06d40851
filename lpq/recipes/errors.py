"""What is wrong with a recipe or a policy, and where: whoever reads a part puts its place in front."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lpq.registry.errors import LpqError


class RecipeError(LpqError, ValueError):
    """A recipe or a policy that cannot be built."""


class UnknownKey(RecipeError):
    """A key that no recipe, or no policy, has."""


class PluginRecipeError(RecipeError):
    """A recipe that a plugin brings and that cannot be built. What else the plugin brings is not affected."""


class RecipeWarning(UserWarning):
    """A recipe or a policy that is understood, and may not be what was meant."""


@contextmanager
def place(name: str) -> Iterator[None]:
    """Say where: an error raised inside becomes a ``RecipeError`` whose message starts with ``name``."""
    try:
        yield
    except RecipeError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    except LpqError as error:
        raise RecipeError(f"{name}: {error}") from error
