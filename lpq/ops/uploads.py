"""Numbers that the host knows, sent to a device that it need not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_REPLAYED: list[Tensor] = []
"""What graphs were recorded to send: each replay sends it again, and no graph says when it is gone."""


def on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers as a tensor on a device. It may be captured in a CUDA graph, which then sends the same ones."""
    numbers = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return numbers.to(device)
    pinned = numbers.pin_memory()
    if capturing(device):
        _REPLAYED.append(pinned)
    return pinned.to(device, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Whether what is launched now is recorded in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
