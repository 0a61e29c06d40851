"""Steps of optimizers: the only hook on all steps, and the watchers that it calls.

torch calls a function before and after the step of any optimizer of this process. So a training loop needs no line for
what lpq does there: the statistics of weights that are gathered quantized are reduced together, an optimizer that would
train nothing is refused, and a policy whose step nobody moves gets a warning. Counting writes would not do: neither a
compiled step nor a fused one leaves a trace in autograd's counts.

An optimizer is looked at once, by its own parameters. One that no watcher is concerned with is left alone afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lpq.operations.reduce_statistics import Reductions


class Watcher:
    """Something that is called before and after steps of optimizers that concern it, for as long as it lives."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        steps().call(self)

    def concerns(self, params: Mapping[int, Tensor]) -> bool:
        """Whether an optimizer of these parameters, by their ids, concerns it, as one of the model does. It is asked
        once for each optimizer, and again where that has other parameters."""
        model = self._model()
        return model is not None and any(id(param) in params for param in model.parameters())

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer, or prepare the parameters that it will write to."""

    def after_step(self, optimizer: Optimizer, reductions: Reductions) -> None:
        """Act on the parameters that the optimizer wrote. All statistics to be reduced are added to ``reductions``,
        which run next."""


class _Look(NamedTuple):
    """An optimizer as it was looked at."""

    params: list[int]
    """The ids of its parameters then."""
    last: int
    """The number of the last watcher that was asked."""
    concerned: list[weakref.ref[Watcher]]


class Steps:
    """The functions that torch calls, and the watchers that they call. Other threads may add watchers meanwhile."""

    def __init__(self) -> None:
        self._watchers: dict[int, weakref.ref[Watcher]] = {}
        """The live watchers, by their numbers, in the order in which they were added."""
        self._last, self._adding = -1, Lock()
        self._looks: weakref.WeakKeyDictionary[Optimizer, _Look] = weakref.WeakKeyDictionary()
        self._parts: list[Optimizer] = []
        """Optimizers whose steps are at present parts of the step of another one."""
        self._done: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers for whose present step the watchers have been called already."""
        register_optimizer_step_pre_hook(torch.compiler.disable(self._before))  # type: ignore[no-untyped-call]
        register_optimizer_step_post_hook(torch.compiler.disable(self._after))  # type: ignore[no-untyped-call]

    def call(self, watcher: Watcher) -> None:
        """Have a watcher called, after those that are called already."""
        with self._adding:
            number = self._last + 1
            self._watchers[number] = weakref.ref(watcher, lambda _: self._watchers.pop(number, None))
            self._last = number

    def watchers(self) -> list[Watcher]:
        """Return all live watchers, in the order in which they were added."""
        return [watcher for ref in self._watchers.copy().values() if (watcher := ref()) is not None]

    def _concerned(self, optimizer: Optimizer) -> list[Watcher]:
        """The watchers that an optimizer concerns."""
        if not self._watchers:
            return []
        params = [number for group in optimizer.param_groups for number in map(id, group["params"])]
        look = self._looks.get(optimizer)
        if look is None or look.params != params:
            look = _Look(params, -1, [])
        if look.last != (last := self._last):
            own = {id(param): param for group in optimizer.param_groups for param in group["params"]}
            new = [ref for number, ref in self._watchers.copy().items() if look.last < number <= last]
            concerned = [ref for ref in new if (watcher := ref()) is not None and watcher.concerns(own)]
            self._looks[optimizer] = look = _Look(params, last, [*look.concerned, *concerned])
        return [watcher for ref in look.concerned if (watcher := ref()) is not None]

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        if not self._is_part(optimizer) and (concerned := self._concerned(optimizer)):
            self._done.discard(optimizer)  # a step that raised may have left it
            for watcher in concerned:
                watcher.before_step(optimizer)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        look = self._looks.get(optimizer)
        if look is None or not look.concerned or self._is_part(optimizer):
            return
        if optimizer not in self._done:
            self.reductions(optimizer).run()
        self._done.discard(optimizer)

    def _is_part(self, optimizer: Optimizer) -> bool:
        return any(part is optimizer for part in self._parts)

    def reductions(self, optimizer: Optimizer) -> Reductions:
        """Return the reductions of all watchers after the step of this optimizer. An optimizer that calls this runs
        them with its own, as its step ends."""
        reductions = Reductions()
        for watcher in self._concerned(optimizer):
            watcher.after_step(optimizer, reductions)
        self._done.add(optimizer)
        return reductions

    @contextmanager
    def part(self, optimizer: Optimizer) -> Iterator[None]:
        """Make the step of this optimizer a part of another optimizer's step, for which alone watchers are called."""
        self._parts.append(optimizer)
        try:
            yield
        finally:
            self._parts.remove(optimizer)  # and not the last one, which another thread may have added


@cache
def steps() -> Steps:
    """The only instance, since torch's hooks are there once for all optimizers."""
    return Steps()
