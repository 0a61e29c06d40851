"""Steps of optimizers: the only hook on all of them, and the watchers that it calls.

torch calls a function before and after the step of any optimizer of this process. So a training loop needs no line
for what lpq does there: the statistics of weights that are gathered quantized are reduced together, an optimizer that
would train nothing is refused, and a policy whose step nobody moves gets a warning. Writes alone would not do: neither
a compiled step nor a fused one leaves a trace in what autograd counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lpq.operations.reduce_statistics import Reductions


class Watcher:
    """Something that is called before and after steps, for as long as it lives."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer, or prepare what it will write to."""

    def after_step(self, optimizer: Optimizer, reductions: Reductions) -> None:
        """Act on what it wrote. Everything to be reduced for that is added to ``reductions``, which run next."""


class Steps:
    """The functions that torch calls, and the watchers that they call."""

    def __init__(self) -> None:
        self._watchers: weakref.WeakKeyDictionary[Watcher, None] = weakref.WeakKeyDictionary()
        self._parts: list[Optimizer] = []
        """Optimizers whose steps are at present parts of the step of another one."""
        self._done: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers for whose present step the watchers have been called already."""
        register_optimizer_step_pre_hook(torch.compiler.disable(self._before))  # type: ignore[no-untyped-call]
        register_optimizer_step_post_hook(torch.compiler.disable(self._after))  # type: ignore[no-untyped-call]

    def call(self, watcher: Watcher) -> None:
        """Have a watcher called, after those that are called already."""
        self._watchers[watcher] = None

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        self._done.discard(optimizer)  # a step that raised may have left it
        if not self._is_part(optimizer):
            for watcher in list(self._watchers):
                watcher.before_step(optimizer)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if not self._is_part(optimizer) and optimizer not in self._done:
            self.reductions(optimizer).run()
        self._done.discard(optimizer)

    def _is_part(self, optimizer: Optimizer) -> bool:
        return any(part is optimizer for part in self._parts)

    def reductions(self, optimizer: Optimizer) -> Reductions:
        """The reductions of all watchers after the step of this optimizer. One that calls it runs them with its own, as
        its step ends."""
        reductions = Reductions()
        for watcher in list(self._watchers):
            watcher.after_step(optimizer, reductions)
        self._done.add(optimizer)
        return reductions

    @contextmanager
    def part(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside of it the step of this optimizer is a part of another one's, for which alone watchers are called."""
        self._parts.append(optimizer)
        try:
            yield
        finally:
            self._parts.remove(optimizer)  # and not the last one, which another thread may have added


@cache
def steps() -> Steps:
    """The only instance, since torch's hooks are there once for all optimizers."""
    return Steps()
