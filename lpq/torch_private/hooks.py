"""Hooks that others hang on modules."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

hooks_before: Callable[[Any], dict[int, Any]] = attrgetter("_forward_pre_hooks")
"""The hooks that are called before a module, with what it is given."""
hooks_behind: Callable[[Any], dict[int, Any]] = attrgetter("_forward_hooks")
"""The hooks that are called behind a module, with what it is given and what it returns."""
