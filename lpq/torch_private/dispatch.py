"""The dispatcher: which modes, tracers and transforms are active around a call, and the schema of an operator."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import return_and_correct_aliasing as return_and_correct_aliasing

PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
"""The key of a tracer that gets operators before autograd does."""

has_key: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
"""Whether a key is in force in this thread."""

modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see every operator that runs in this thread."""

without_modes: Callable[[], Any] = _disable_current_modes
"""A context in which no mode sees operators."""

transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether this runs inside of a transform of ``torch.func``."""


def reaching_transforms() -> Any:
    """A context in which ``torch.vmap`` works, also in an operator that a mode has called: there the dispatcher leaves
    out its keys, and it fails."""
    local, keys = torch._C, torch._C.DispatchKey
    excluded = local._dispatch_tls_local_exclude_set()
    for key in (keys.FuncTorchDynamicLayerFrontMode, keys.FuncTorchDynamicLayerBackMode, keys.FuncTorchBatched):
        excluded = excluded.remove(key)
    return local._ForceDispatchKeyGuard(local._dispatch_tls_local_include_set(), excluded)


jit_traces: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` records the operators that run in this thread."""

autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any kind of device."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The name of an operator, and its arguments, marked where it writes to them."""
