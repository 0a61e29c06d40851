"""Autograd's engine: which pass runs, and what it will run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""A number of the backward that runs in this thread; -1 outside of any."""


def runs_node(name: str) -> bool:
    """Whether the node that runs in this thread has this name."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == name


will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether this backward will run a node. Raises where ``torch.autograd.grad`` returns the gradient that the node
accumulates."""

runs_whole: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid
"""Whether the backward that runs in this thread computes all gradients that it gets to. It does not under
``torch.autograd.grad`` or with ``inputs=``."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether another backward may follow the one that runs in this thread, over the same graph; true outside of any."""

at_the_end_of_backward: Callable[[Callable[[], None]], None]
at_the_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""Have a function called when the backward that runs now has made all gradients. Backward raises its errors."""

hooks_that_save: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""The hooks for saved tensors that are in force, as activation checkpointing sets them; None: there are none."""


def recomputes(hooks: Any) -> bool:
    """Whether under these hooks checkpointing that is not reentrant runs forward again."""
    return "_recomputation_hook." in getattr(hooks[1], "__qualname__", "")
