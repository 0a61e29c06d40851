"""The caller of what runs now, as far as the frames of Python show it."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from types import CodeType, FrameType

from torch import nn

LOOKS = frozenset({"device", "dtype", "ndim", "requires_grad", "shape"})
"""Attributes of a tensor that tell nothing of its values."""
ENGINE = "torch.autograd.graph"
"""The module of the function that starts autograd's engine; the engine's own threads begin without a frame."""


def engine_calls() -> bool:
    """Whether the code of lpq that runs now was called by what runs in autograd's engine without Python in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame).startswith("lpq."):
        frame = frame.f_back
    return frame is None or _module(frame) == ENGINE


def another_pass_reads(module: nn.Module) -> bool:
    """Whether the code that reads an attribute of this module, two frames up, runs in the pass of another module, and
    reads more of the tensor than its dtype and the like. Code of lpq and of torch does not count as a model's, except
    torch's modules: it shards, copies and loads models."""
    reader = sys._getframe(2)
    name = _module(reader)
    if name.startswith(("lpq.", "lpq_", "torch.")) and not name.startswith("torch.nn.modules."):
        return False
    frame: FrameType | None = reader
    while frame is not None and frame.f_code is not nn.Module.__call__.__code__:
        frame = frame.f_back
    if frame is None or frame.f_locals["self"] is module:
        return False
    return _next_attribute(reader.f_code, reader.f_lasti) not in LOOKS


@lru_cache(256)
def _next_attribute(code: CodeType, at: int) -> str | None:
    """The attribute that the next instruction takes of the result of this instruction."""
    following = next((i for i in dis.get_instructions(code) if i.offset > at), None)
    return following.argval if following is not None and following.opname == "LOAD_ATTR" else None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
