"""The order of arguments: the model is the first one. The earlier order is understood for one version."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from torch import nn

from lpq.registry.warning import deprecate

F = TypeVar("F", bound=Callable[..., Any])


def model_first(function: F) -> F:
    """Let ``function(model, path, …)`` be called as ``function(path, model, …)``, too, with a ``DeprecationWarning``.

    A model is a module and a path is none, so the two orders cannot be taken for each other."""
    model, path, *_ = signature(function).parameters
    name = f"{function.__module__.rpartition('.')[0]}.{function.__name__}"

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if args and not isinstance(args[0], nn.Module):
            if isinstance(keywords.get(model), nn.Module) and path not in keywords:
                args, keywords = args[1:], {path: args[0], **keywords}
            elif len(args) > 1 and isinstance(args[1], nn.Module):
                args = (args[1], args[0], *args[2:])
            else:
                return function(*args, **keywords)
            now = f"the model is the first argument, call {name}({model}, {path})"
            deprecate(f"{name}({path}, {model})", gone_in="0.2", now=now)
        return function(*args, **keywords)

    return cast("F", call)
