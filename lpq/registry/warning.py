"""Warnings that point to the user's line: the line of the first caller which is neither lpq, nor a plugin, nor
torch."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

BETWEEN = frozenset({"lpq", "torch", "pluggy", "concurrent", "contextlib", "functools", "importlib", "threading"})
"""The packages whose frames lie between a warning and the user's line: lpq, and the packages through which it is
called."""
PLUGIN = "lpq_"
"""The first letters of the packages of plugins."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user; in a thread that the user did not start, such as autograd's, at a line of lpq.

    A compiler cannot trace it: code that is traced calls ``torch.compiler.is_compiling()`` first, or is an operator.
    """
    caller = sys._getframe(1)
    frame: FrameType | None = caller
    while frame is not None and _between(frame):
        frame = frame.f_back
    place = frame or caller
    names = place.f_globals
    warnings.warn_explicit(
        text,
        category,
        place.f_code.co_filename,
        place.f_lineno,
        module=names.get("__name__", "<unknown>"),
        registry=names.setdefault("__warningregistry__", {}),  # so Python shows the same text from the same line once
    )


def deprecate(old: str, *, gone_in: str, now: str) -> None:
    """Warn that a name is an old one.

    Args:
        gone_in: the version that no longer has it: the next one, which ``tests/test_release.py`` holds.
        now: what to do in its place.
    """
    warn(f"{old} will be removed in lpq {gone_in}: {now}", DeprecationWarning)


def _between(frame: FrameType) -> bool:
    """Whether a frame belongs to lpq, to a package that calls it, or to generated code, which has no module."""
    module = frame.f_globals.get("__package__") or frame.f_globals.get("__name__") or "torch"
    package = module.partition(".")[0]
    return package in BETWEEN or package.startswith(PLUGIN)
