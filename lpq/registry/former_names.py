"""Earlier names of functions and methods, which work for one version."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from lpq.registry.warning import deprecate

F = TypeVar("F", bound=Callable[..., Any])


def former(old: str, function: F) -> F:
    """Return ``function`` under its earlier name ``old``, which warns.

    Args:
        old: The earlier name, with its module or its class.
        function: The function or the method of now; for a class method, the object in the body of its class.
    """
    inner = function.__func__ if isinstance(function, classmethod) else function

    @wraps(inner)
    def call(*args: Any, **keywords: Any) -> Any:
        deprecate(old, gone_in="0.2", now=f"call {inner.__name__}")
        return inner(*args, **keywords)

    call.__doc__ = f"The former name of ``{inner.__name__}``."
    return cast("F", classmethod(call) if isinstance(function, classmethod) else call)


def former_attribute(old: str, now: str) -> Any:
    """Return a property under its earlier name, which warns.

    Args:
        old: The earlier name, with a name for the object.
        now: The name of the attribute now.
    """

    def read(self: Any) -> Any:
        deprecate(old, gone_in="0.2", now=f"it is {old.partition('.')[0]}.{now} now")
        return getattr(self, now)

    return property(read, doc=f"The former name of ``{now}``.")
