"""The current CUDA device and stream, as numbers: torch's public functions for them take five times as long.

A build without CUDA lacks them, and never uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C

current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current device."""

current_stream: Callable[[int], int] = getattr(
    _C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""The address of the current stream of a device."""
