"""The caller of what runs now, as far as the frames of Python show it."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

ENGINE = "torch.autograd.graph"
"""The module of the function that starts autograd's engine; the engine's own threads begin without a frame."""


def engine_calls() -> bool:
    """Whether the code of lpq that runs now was called by what runs in autograd's engine without Python in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame).startswith("lpq."):
        frame = frame.f_back
    return frame is None or _module(frame) == ENGINE


def running_module() -> nn.Module | None:
    """The module whose pass runs now, the innermost one; None if none was called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module.__call__.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
