"""Runs of a layer that activation checkpointing runs again in backward, and what the layer remembers meanwhile.

A run that is recomputed must see what it saw. What a layer remembers moves in backward: of two runs, the backward of
one moves it before the other is recomputed. Autograd counts the writes to a tensor, so a state is known by its counts.
There are two ways to checkpoint. One saves tensors that it recomputes: among them is saved what the run saw that they
come from, and backward compares. The other runs forward inside of an autograd function, and again in that function's
backward: what a run saw is noted on the function's context. A run of which nothing is noted is compared with the last.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from lpq.torch_private import autograd
from lpq.torch_private.tensors import version_of

if TYPE_CHECKING:
    from lpq.nn.saved import Saved

NOTES = "_lpq_seen"
States = Mapping[str, Mapping[str, Tensor]]


def runs_again() -> bool:
    """Whether this forward is one of activation checkpointing, which runs it again in backward."""
    return not torch.is_grad_enabled() or autograd.saves_to_hooks()


def check(layer: Saved, states: States) -> None:
    """Forward of a layer that remembers begins: an error if it runs again and does not see what it saw."""
    if torch.compiler.is_compiling():
        return
    found = _counts(states)
    if autograd.graph_task() == -1:  # outside of backward
        layer.__dict__["_seen"] = found
    else:
        noted = getattr(autograd.current_node(), NOTES, {})
        if noted.get(id(layer), layer.__dict__.get("_seen", found)) != found:
            _refuse(layer.title)
    if not torch.is_grad_enabled() and (context := _context()) is not None:
        context.__dict__.setdefault(NOTES, {})[id(layer)] = found


def _context() -> Any:
    """The context of the autograd function whose forward this runs in; None: of none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_varnames[:1] == ("ctx",):
            return frame.f_locals["ctx"]
        frame = frame.f_back
    return None


def seen(states: States) -> Tensor | None:
    """What tells, saved among the tensors of a run, what the run saw that they come from; None: nobody recomputes."""
    if torch.compiler.is_compiling() or not autograd.saves_to_hooks():
        return None
    return torch.tensor(_counts(states))


def compare(before: list[int], saved: Tensor) -> None:
    """Backward of a run begins: an error if what it saved was recomputed by one that saw something else."""
    if saved.tolist() != before:
        _refuse("a layer with a recipe")


def _counts(states: States) -> list[int]:
    """How often what forward reads was written to."""
    read = [memory for tensor in ("x", "w") if tensor in states for memory in states[tensor].values()]
    return [0 if memory.is_inference() else version_of(memory) for memory in read]


def _refuse(who: str) -> NoReturn:
    raise RuntimeError(
        f"{who}: activation checkpointing runs it again in backward, and what it remembers for delayed scaling has "
        "moved since it ran: it would compute other numbers. That happens where a layer runs several times before "
        "backward. Leave it out of checkpointing, or give it a recipe that remembers nothing"
    )
