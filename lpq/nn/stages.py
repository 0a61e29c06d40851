"""Stages of a policy: the last step that a model was given, and a warning where it is not given the next step.
``Stages.after_step`` is called after the step of any optimizer, and forward of a layer compares. A model whose recipes
do not change by step has no ``Stages``, and pays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lpq.distributed.optimizer_steps import Watcher
from lpq.kernels.host_to_device import recording
from lpq.operations.reduce_statistics import Reductions
from lpq.recipes import Schedule
from lpq.registry.warning import warn


def last_change(schedules: Iterable[Schedule | None]) -> int | None:
    """The step from which on no stage changes the recipe; None if a stage ends at a fraction of an unknown length."""
    ends = [until for schedule in schedules if schedule for until, _ in schedule.pieces if until is not None]
    return None if any(isinstance(end, float) for end in ends) else max((int(end) for end in ends), default=0)


class Stages(Watcher):
    """The present step of a converted model whose policy gives layers other recipes at later steps."""

    def __init__(self, model: nn.Module, last: int | None) -> None:
        super().__init__(model)
        self._by: weakref.ref[Optimizer] | None = None
        self.step = 0
        self.was_set = False
        """Whether ``set_step`` has given one."""
        self.last = last
        """The step from which on no recipe changes any more; None: not known yet."""
        self.due = False
        """Whether an optimizer of the model has made a step since the step moved."""
        self.warned = False
        self.recorded = False
        """Whether the last pass in training, or the last step of an optimizer, was recorded in a CUDA graph."""
        self.changed_at: int | None = None
        """The step at which recipes changed, if no pass and no step of an optimizer has begun since."""

    @property
    def moving(self) -> bool:
        """Whether a later step may change a recipe."""
        return self.last is None or self.step < self.last

    def move(self, step: int, changes: bool) -> None:
        """Take the step that ``set_step`` gives; ``changes``: whether a recipe changes with it."""
        self.was_set = True
        if step == self.step:
            return
        if self.recorded and self.changed_at is not None:
            warn(
                f"recipes changed at step {self.changed_at}, and neither a forward nor an optimizer's step has begun "
                "since: training was recorded in a CUDA graph, whose replays go on with the recipes before. Record it "
                "again when lpq.set_step has changed recipes"
            )
            self.changed_at = None
        self.step, self.due, self._by = step, False, None
        if changes:
            self.changed_at = step

    def check(self, layer: nn.Module) -> None:
        """Warn once, when forward of a layer begins, if the step should have moved. A compiled one does not check."""
        if torch.compiler.is_compiling() or not (layer.training and torch.is_grad_enabled()):
            return
        self._note()
        if self.due:
            self._warn()

    def after_step(self, optimizer: Optimizer, reductions: Reductions) -> None:
        """Note that an optimizer has made a step."""
        self._note()
        if self.warned or not self.moving:
            return
        if self._by is not None and self._by() is optimizer:
            self._warn()  # a compiled model has not warned
        elif not self.due:
            self.due, self._by = True, weakref.ref(optimizer)

    def _note(self) -> None:
        self.recorded = recording()
        self.changed_at = None

    def _warn(self) -> None:
        self.due, self.warned = False, True
        until = "" if self.last is None else f", the last time at step {self.last}"
        warn(
            f"an optimizer has made a step, and the policy's step is {self.step} as before: its recipes change by "
            f"step{until}, and do so only if the training loop calls lpq.set_step(model, step) before each step; "
            "with Hugging Face's Trainer LpqCallback does",
        )
