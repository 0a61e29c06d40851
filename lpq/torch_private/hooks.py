"""Hooks that others hang on modules."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

hooks_before: Callable[[Any], dict[int, Any]] = attrgetter("_forward_pre_hooks")
"""The hooks that are called before a module, with what it is given."""
hooks_behind: Callable[[Any], dict[int, Any]] = attrgetter("_forward_hooks")
"""The hooks that are called behind a module, with what it is given and what it returns."""

hooks_of: Callable[[Any], tuple[dict[int, Any], ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
"""The hooks that a call of a module, or a gradient that goes through it, calls."""

global_hooks: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook
"""Whether a hook is called with every module."""


def has_hooks(module: Any) -> bool:
    """Whether a call of the module, or a gradient that goes through it, calls hooks that were hung on it."""
    return any(hooks_of(module))
