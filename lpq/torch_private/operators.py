"""Operators whose names begin with an underscore, and functions beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._prims_common import canonicalize_dim as canonicalize_dim

to_copy: Any = torch.ops.aten._to_copy
"""The copy of a tensor in another dtype or on another device."""

pin_memory: Any = torch.ops.aten._pin_memory
"""The copy of a tensor in memory from which a device reads while the host goes on."""

unsafe_view: Any = torch.ops.aten._unsafe_view
"""A view that autograd does not take for a view: for a tensor that is no longer used under its own shape."""

scaled_matmul: Callable[..., Tensor] = torch._scaled_mm
"""The product of two fp8 matrices with scales, which ``nn.functional.scaled_mm`` calls once it has checked them."""

scaled_grouped_matmul: Callable[..., Tensor] = torch._scaled_grouped_mm
"""torch's scaled product for rows in groups, with a scale for each row; on GPUs alone."""

grouped_matmul: Any = torch.ops.aten._grouped_mm
"""The operator of ``nn.functional.grouped_mm``."""

OF_EACH = "_foreach_"
"""The beginning of the names of operators that do for each tensor of a list what another does for one."""

copy_each: Callable[..., None] = torch._foreach_copy_
"""Copies tensors into others, in few launches. A parameter in the list counts no write before torch 2.12."""

norm_of_each: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm
"""The norm of each of these tensors, in few launches."""

rms_norm_gradients: Callable[..., tuple[Tensor | None, Tensor | None]] = torch.ops.aten._fused_rms_norm_backward
"""The gradients of ``F.rms_norm``, with the factors of the rows that its forward found; on GPUs alone."""


def has_fast_bf16() -> bool:
    """Whether oneDNN multiplies bf16 matrices on this processor. A build without oneDNN has no such question."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(cast("Any", supported)())
