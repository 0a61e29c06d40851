"""TOML: files of it, read with errors in words, and the text of a table. Python reads TOML and does not write it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpq.registry.errors import LpqError
from lpq.registry.reading import read_text


def read(path: Path, name: str, deepest: str, error: type[LpqError]) -> dict[str, Any]:
    """The table in a file. An ``error`` has its ``name``, and says of a file that is nested too deep what the
    ``deepest`` of its kind are."""
    try:
        return tomllib.loads(read_text(path))
    except OSError as cause:
        raise error(f"{name} cannot be read: {cause.strerror or cause}; name another file") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise error(f"{name} is not TOML: {cause}") from cause
    except RecursionError:
        raise error(f"{name} is nested deeper than {deepest}: correct it") from None


def text_of(table: Mapping[str, object]) -> str:
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
    # A JSON string, number, boolean or array of these is TOML too, apart from DEL, which JSON leaves bare, and from
    # surrogate pairs, as JSON escapes characters beyond 16 bits.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
