"""TOML, as much of it as recipes and policies need. Python reads it and does not write it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpq.recipes.errors import RecipeError
from lpq.registry.reading import read_text

NESTED = "is nested deeper than a recipe or a policy is: correct it"


def path(source: object) -> Path | None:
    """The path that ``source`` is, if it is one: a ``Path``, or a string that ends in ``.toml``."""
    if isinstance(source, Path):
        return source
    return Path(source) if isinstance(source, str) and source.endswith(".toml") else None


def read(path: Path) -> dict[str, Any]:
    """The table in a file."""
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise RecipeError(f"{path} {NESTED}") from None


def parsed(source: object) -> object:
    """The table in TOML text, which is text with a line break; anything else is returned itself."""
    if isinstance(source, str) and "\n" in source:
        try:
            return tomllib.loads(source)
        except tomllib.TOMLDecodeError as error:
            if source.lstrip().startswith("["):  # as the grammar of recipes never does
                raise RecipeError(f"this text is not TOML: {error}") from error
        except RecursionError:
            raise RecipeError(f"this text {NESTED}") from None
    return source


def written(table: Mapping[str, object]) -> str:
    """The text of a table of plain values, and then of tables, or lists of tables, of plain values."""
    lines = [f"{key} = {_plain(value)}" for key, value in table.items() if not _tables(value)]
    for key, value in table.items():
        header = f"[{key}]" if isinstance(value, Mapping) else f"[[{key}]]"
        for inner in _tables(value):
            lines += ["", header, *(f"{k} = {_plain(v)}" for k, v in inner.items())]
    return "\n".join(lines).lstrip() + "\n"


def _tables(value: object) -> list[Mapping[str, object]]:
    inner = value if isinstance(value, list) else [value]
    return [table for table in inner if isinstance(table, Mapping)]


def _plain(value: object) -> str:
    # A JSON string, number, boolean or array of these is TOML too, apart from DEL, which JSON leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
