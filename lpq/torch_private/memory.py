"""Memory of tensors: allocating it, and telling whether two tensors share it."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

storage_number: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""A number that storages of the same memory have in common, and no others at the same time."""

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a size, strides and a dtype, uninitialised."""


def allocator(device: torch.device, *, dispatched: bool = False) -> Allocate:
    """Return the function that allocates on a device, whose index must be the current one.

    Inductor's own function takes the host a quarter of the time of ``torch.empty_strided``, as it bypasses the
    dispatcher. A torch without it uses ``torch.empty_strided``.

    Args:
        device: The device.
        dispatched: Whether the dispatcher must not be bypassed.
    """
    guards: Any = getattr(torch._C._dynamo, "guards", None)
    allocate = getattr(guards, f"_empty_strided_{device.type}", None)
    if allocate is not None and not dispatched:
        return cast("Allocate", allocate)
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
