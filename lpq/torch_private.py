"""Private names of torch, each with what it saves and what stands in for it where a torch lacks it.

``tests/test_torch_private.py`` says for which versions they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def is_exporting() -> bool:
    """Whether ``torch.export`` traces. Where torch 2.11 compiles, ``torch.compiler.is_exporting`` is true, too."""
    return bool(torch.compiler._is_exporting_flag)


Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a size, strides and a dtype, uninitialised."""


def allocator(device: torch.device, *, dispatched: bool = False) -> Allocate:
    """What allocates on a device, whose index must be the current one.

    Inductor's own function takes the host a quarter of the time of ``torch.empty_strided``, as it bypasses the
    dispatcher; ``dispatched``: it must not.
    """
    guards: Any = getattr(torch._C._dynamo, "guards", None)
    found = getattr(guards, f"_empty_strided_{device.type}", None)
    if found is not None and not dispatched:
        return cast("Allocate", found)
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
