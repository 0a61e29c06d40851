"""The functions that an optimizer calls around steps and loading, in their order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch.optim import Optimizer

Hooks = OrderedDict[int, Callable[..., Any]]

load_pre_hooks: Callable[[Optimizer], Hooks] = attrgetter("_optimizer_load_state_dict_pre_hooks")
"""The hooks that are called before an optimizer loads a state, each with the result of the previous one."""

load_post_hooks: Callable[[Optimizer], Hooks] = attrgetter("_optimizer_load_state_dict_post_hooks")
"""The hooks that are called after an optimizer loaded a state."""

step_hooks: Callable[[Optimizer], Any] = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The hooks that are called before a step of an optimizer, and those after it."""
