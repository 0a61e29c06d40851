"""The steps of optimizers: what one writes to stored tensors is encoded once, when it ends, with one reduction.

torch calls a function before and after the step of any optimizer, but none when the step raises. So a step is known by
the frame of torch's function around it, and runs for as long as that does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lpq.operations.reduce_statistics import Reductions
from lpq.tensor.draft import Draft
from lpq.tensor.encode_writes import write
from lpq.tensor.finite import Finite
from lpq.tensor.quantized_tensor import QuantizedTensor
from lpq.torch_private.optimizers import post_step_hooks
from lpq.torch_private.tensors import local_part

AROUND = Optimizer.profile_hook_step.__code__.co_filename
"""Where torch's function around a step lies."""
STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""That function; others beside it are around parts of a step."""


class Step:
    """The step of one optimizer over stored tensors; their drafts know it while it runs."""

    def __init__(self, frame: FrameType, tensors: Sequence[QuantizedTensor]) -> None:
        self.frame: FrameType | None = frame
        self.made: dict[Draft, Tensor | None] = {}
        """The matrix of each draft that was written to."""
        self.unless: dict[Draft, Tensor | None] = {}
        """See ``Draft.unless``."""
        self._tensors = tensors
        for tensor in tensors:
            tensor.draft.step = self

    @property
    def running(self) -> bool:
        """Whether it has neither ended nor raised: a frame that runs, in whatever thread, refuses to be cleared.

        One that has ended forgets its variables by that, which nobody reads; of a step that raised, all drafts are
        dropped. To look for the frame on the stacks of threads is not safe: in Python 3.11 they may go on while one is
        walked.
        """
        frame = self.frame
        if frame is not None:
            try:
                frame.clear()
            except RuntimeError:
                return True
            self.frame = None  # it has kept those that called it, and their variables
        self.made.clear()
        self.unless.clear()
        return False

    def write(self, only: Draft | None = None, ended: Optimizer | None = None) -> None:
        """Encode what was written so far: all tensors with one reduction, which all ranks have to do; or one tensor.

        ``ended``: the optimizer whose step this was; what else it asks to have reduced is reduced as well.
        """
        drafts = [(t, t.draft.matrix, t.draft.unless) for t in self._tensors if only is None or t.draft is only]
        written = [(tensor, matrix, unless) for tensor, matrix, unless in drafts if matrix is not None]
        if written:
            targets, values, unless = zip(*written, strict=True)
            write(targets, values, unless, reduced_with(ended) if ended is not None else None)
            watch().finite.check(targets, values)

    def end(self, optimizer: Optimizer) -> None:
        try:
            self.write(ended=optimizer)
        finally:
            for tensor in self._tensors:
                tensor.draft.step = None


class _End:
    """Ends the steps of one optimizer, before any other function that is called after them looks at the weights."""

    def __init__(self) -> None:
        self.step: Step | None = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self.step
        if step is None or torch.compiler.is_compiling():
            return
        if step.frame is not None and step.frame is _around():
            self.step = None
            step.end(optimizer)

    @classmethod
    def of(cls, optimizer: Optimizer) -> _End:
        """The one that this optimizer has, or gets."""
        hooks = post_step_hooks(optimizer)
        for hook in hooks.values():
            if isinstance(hook, cls):
                return hook
        end = cls()
        hooks.move_to_end(optimizer.register_step_post_hook(end).id, last=False)
        return end


class _Watch:
    """What torch calls before the step of any optimizer of this process."""

    def __init__(self) -> None:
        self.asked: list[Callable[[Optimizer, Reductions], None]] = []
        """The functions that add what else is reduced when a step has written to stored weights."""
        self.finite = Finite()
        register_optimizer_step_pre_hook(self)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # what is traced writes at each operation
            return
        # Within a step that is running (of an optimizer that wraps this one), that one will write.
        stored = [tensor for tensor in _stored(optimizer) if not tensor.draft.open]
        frame = _around()
        if stored and frame is not None:
            _End.of(optimizer).step = Step(frame, stored)


@cache
def watch() -> _Watch:
    """Have torch call it; once, when the first stored tensor is made."""
    return _Watch()


def reduce_beside(add: Callable[[Optimizer, Reductions], None]) -> None:
    """Where the step of an optimizer writes to stored weights, have ``add`` say what is reduced in the same collective.

    It is called before that, once in a step, on all ranks or on none.
    """
    watch().asked.append(add)


def reduced_with(optimizer: Optimizer) -> Reductions:
    """What is reduced together with the statistics of what a step of this optimizer writes."""
    reductions = Reductions()
    for add in watch().asked:
        add(optimizer, reductions)
    return reductions


def wrapping(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer in whose step that of this one, in which it is asked, is running; None if there is none.

    It may be the same one: where a class calls the step of its base, torch may have put its function around both.
    """
    frame, steps = _around(), 0
    while frame is not None:
        stepping = frame.f_locals.get("self")
        steps += stepping is optimizer and frame.f_code is STEP
        if isinstance(stepping, Optimizer) and (stepping is not optimizer or steps > 1):
            return stepping
        frame = _around(frame.f_back)
    return None


def _stored(optimizer: Optimizer) -> Iterator[QuantizedTensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = local_part(parameter)  # this rank's part of a sharded one
            if isinstance(local, QuantizedTensor) and local.window is None:  # a part of another is not drafted alone
                yield local


def _around(called: FrameType | None = None) -> FrameType | None:
    """The frame of torch's function around the step, which called the function that asks; or the nearest from there."""
    frame: FrameType | None = called if called is not None else sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != AROUND:
        frame = frame.f_back
    return frame
