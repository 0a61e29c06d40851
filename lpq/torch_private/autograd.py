"""Autograd's engine: which pass runs, what it will run, and writes that it is not to count."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""A number of the backward that runs in this thread; -1 outside of any."""

will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether this backward will run a node. Raises where ``torch.autograd.grad`` returns the gradient that the node
accumulates."""

uncounted: Callable[[tuple[Tensor, ...]], AbstractContextManager[None]] = (
    torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
)
"""Inside of it autograd does not count what is written to these tensors."""


def saves_to_hooks() -> bool:
    """Whether hooks for saved tensors are in force, as activation checkpointing sets them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
