"""Numbers that the host knows, sent to a device that it need not wait for: for casts of master weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers as a tensor on a device."""
    check_not_captured(device)
    numbers = torch.tensor(values, dtype=dtype)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def check_not_captured(device: torch.device) -> None:
    """Refuse to be recorded in a CUDA graph, which would read the host's memory again when it holds something else."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):  # torch tells it of the current device only
        captured = torch.cuda.is_current_stream_capturing()
    if captured:
        raise RuntimeError(
            "casting master weights cannot be recorded in a CUDA graph: it sends the places of the weights from the "
            "host to the device. Call it outside of what is captured"
        )
