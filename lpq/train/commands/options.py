"""The fields of ``TrainConfig`` as options of commands."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

from lpq.train.config import TYPES, TrainConfig


def values_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given, as values of the fields."""
    return {k: v for k, v in options.items() if v is not None and v != []}


def parameters(names: Iterable[str], defaults: Mapping[str, str] | None = None) -> list[inspect.Parameter]:
    """The options of these fields; ``defaults`` says in words what a command has for some in place of the default."""
    by_name = {f.name: f for f in fields(TrainConfig)}
    options = []
    for name in names:
        field, kind = by_name[name], TYPES[name]
        if get_origin(kind) is tuple:
            kind = list[str]
        elif isinstance(kind, UnionType):
            kind = get_args(kind)[0]
        flag = f"--{name.replace('_', '-')}"
        spelled = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        usual = str(field.default).lower() if kind is bool else str(field.default)
        default: str | bool = usual if field.default is not None and field.default != () else False
        default_text = (defaults or {}).get(name, default)
        options.append(
            parameter(name, kind, typer.Option(spelled, help=field.metadata["help"], show_default=default_text))
        )
    return options


def parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """An option of a command, None by default: one that is not given may come from a file or a resumed run."""
    hint = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def take(command: Any, *options: inspect.Parameter) -> None:
    """Give a command these options: typer reads them from its signature and its annotations."""
    command.__signature__ = inspect.Signature(options)
    command.__annotations__ = {option.name: option.annotation for option in options}
