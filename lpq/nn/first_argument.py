"""The first argument of public functions: the model."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)
"""The class of a model that a function returns as it got it."""


def check_model(model: object, error: type[Exception] = TypeError) -> None:
    """Refuse all but a module."""
    if not isinstance(model, nn.Module):
        raise error(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself, no state_dict(), as "
            "the first argument"
        )
