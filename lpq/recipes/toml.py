"""Recipes and policies in TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from lpq.recipes.errors import RecipeError
from lpq.registry import toml

DEEPEST = "a recipe or a policy is"


def path(source: object) -> Path | None:
    """The path that ``source`` is, if it is one: a ``Path``, or a string that ends in ``.toml``."""
    if isinstance(source, Path):
        return source
    return Path(source) if isinstance(source, str) and source.endswith(".toml") else None


def read(path: Path) -> dict[str, Any]:
    """The table in a file."""
    return toml.read(path, str(path), DEEPEST, RecipeError)


def parsed(source: object) -> object:
    """The table in TOML text, which is text with a line break; anything else is returned itself."""
    if isinstance(source, str) and "\n" in source:
        try:
            return tomllib.loads(source)
        except tomllib.TOMLDecodeError as error:
            if source.lstrip().startswith("["):  # as the grammar of recipes never does
                raise RecipeError(f"this text is not TOML: {error}") from error
        except RecursionError:
            raise RecipeError(f"this text is nested deeper than {DEEPEST}: correct it") from None
    return source
