"""The first argument of public functions: the model."""

from __future__ import annotations

from torch import nn


def check_model(model: object, error: type[Exception] = TypeError) -> None:
    """Refuse all but a module."""
    if not isinstance(model, nn.Module):
        raise error(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself, no state_dict(), as "
            "the first argument"
        )
