"""Arguments that many public functions take: the model, which is the first one, and plain options."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from torch import nn

from lpq.registry.errors import suggestion
from lpq.registry.showing import brief

Model = TypeVar("Model", bound=nn.Module)
"""The class of a model that a function returns as it got it."""


def check_model(model: object, error: type[Exception] = TypeError) -> None:
    """Refuse all but a module."""
    if not isinstance(model, nn.Module):
        raise error(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself, no state_dict(), as "
            "the first argument"
        )


def check_flags(owner: str, error: type[Exception] = TypeError, /, **given: object) -> None:
    """Refuse options that are neither True nor False, each by its name: ``"no"`` would count as true."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise error(f"{owner}: {name}={brief(value)}: it is True or False")


def check_whole(owner: str, least: int, error: type[Exception] = ValueError, /, **given: object) -> None:
    """Refuse values that are no whole numbers from ``least`` on, each by the name of its argument."""
    for name, value in given.items():
        if type(value) is not int or value < least:
            raise error(f"{owner}: {name}={brief(value)}: it is a whole number from {least} on")


def check_choices(choices: Collection[object], error: type[Exception] = ValueError, /, **given: object) -> None:
    """Refuse options that are none of the choices, each by its name."""
    for name, value in given.items():
        if value not in choices:
            raise error(f"{name}={brief(value)}: {suggestion(str(value), map(str, choices))}")
