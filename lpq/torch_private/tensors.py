"""The private parts of a tensor, and the function that creates a subclass of ``Tensor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often autograd saw the tensor, or a view of it, written to. It raises for a tensor of ``inference_mode``."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor whose view this tensor is to autograd; None if it is no view."""

has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""Whether a tensor has memory. A tensor that stands for a batch, as with ``is_grads_batched=True``, has none."""

wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a shape, strides, a dtype and a device, and no memory of its own."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a subclass that leaves functions of torch as they are; operators still come to it."""

PARAMETER = "_is_param"  # by which torch knows a tensor of a subclass as an nn.Parameter


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: the very object, where ``DTensor.to_local`` makes a view."""
    return getattr(tensor, "_local_tensor", tensor)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``local_part`` of each, by one call."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def is_parameter(tensor: object) -> bool:
    """Whether a tensor of a subclass was made an ``nn.Parameter``, which then keeps its class."""
    return bool(getattr(tensor, PARAMETER, False))


def mark_as_parameter(tensor: Tensor) -> None:
    """Have ``isinstance(tensor, nn.Parameter)`` be true of a tensor of a subclass."""
    setattr(tensor, PARAMETER, True)
