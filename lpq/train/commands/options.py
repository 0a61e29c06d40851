"""The fields of ``TrainConfig`` as options of commands."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

from lpq.train.config import TYPES, TrainConfig


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given, as values of the fields."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if v is not None and v != []}


def parameters(names: Iterable[str], defaults: Mapping[str, str] | None = None) -> list[inspect.Parameter]:
    """The options of these fields; ``defaults`` says in words what a command has for some in place of the default."""
    known = {f.name: f for f in fields(TrainConfig)}
    made = []
    for name in names:
        field, kind = known[name], TYPES[name]
        if get_origin(kind) is tuple:
            kind = list[str]
        elif isinstance(kind, UnionType):
            kind = get_args(kind)[0]
        flag = f"--{name.replace('_', '-')}"
        spelled = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        usual = str(field.default).lower() if kind is bool else str(field.default)
        default: str | bool = usual if field.default is not None and field.default != () else False
        shown = (defaults or {}).get(name, default)
        made.append(parameter(name, kind, typer.Option(spelled, help=field.metadata["help"], show_default=shown)))
    return made


def parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """An option of a command, None by default."""
    hint = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
