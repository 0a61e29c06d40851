"""The text that ``help`` shows of a class whose fields are its interface. Python keeps no docstring of a field, so they
are read from the source, when somebody asks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any


def describe_fields(names: Iterable[object]) -> None:
    """Have ``help`` of dataclasses and named tuples end with their fields."""
    for cls in names:
        if isinstance(cls, type) and (is_dataclass(cls) or hasattr(cls, "_fields")):
            cls.__doc__ = _Text(cls.__doc__ or "")  # type: ignore[assignment]  # which type's own getter calls


class _Text:
    """The docstring of a class, made when it is read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, cls: Any) -> str:
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError, SyntaxError):  # there is no source here
            return self._text
        assert isinstance(tree, ast.ClassDef)
        return "\n".join([inspect.cleandoc(self._text), "", "Fields:", *_fields(tree)])


def _fields(tree: ast.ClassDef) -> Iterator[str]:
    for field, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign):
            yield f"    {ast.unparse(field)}"
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield textwrap.indent(inspect.cleandoc(str(after.value.value)), " " * 8)
