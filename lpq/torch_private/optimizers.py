"""The functions that an optimizer calls around loading, in their order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch.optim import Optimizer

Hooks = OrderedDict[int, Callable[..., Any]]

load_pre_hooks: Callable[[Optimizer], Hooks] = attrgetter("_optimizer_load_state_dict_pre_hooks")
"""Those that are called before it loads a state, each with what the one before returned."""

load_post_hooks: Callable[[Optimizer], Hooks] = attrgetter("_optimizer_load_state_dict_post_hooks")
"""Those that are called after it loaded one."""
