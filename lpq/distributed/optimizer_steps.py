"""Steps of optimizers: the only hook on all steps, and the watchers that it calls. So a training loop needs no line for
what lpq does there. An optimizer is looked at once, by its own parameters. One that no watcher is concerned with is
left alone afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Lock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lpq.distributed.step_check import Reduced
from lpq.operations.reduce_statistics import Reductions


class Watcher:
    """Something that is called before and after steps of optimizers that concern it, for as long as it lives."""

    def __init__(self, model: nn.Module | None = None) -> None:
        """``model``: it is not kept alive; None: the class says which optimizers concern it."""
        self._model: Callable[[], nn.Module | None] = (lambda: None) if model is None else weakref.ref(model)
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


@dataclass
class _Look:
    """An optimizer as it was looked at."""

    optimizer: weakref.ref[Optimizer]
    params: list[int]
    """The ids of its parameters then."""
    last: int = -1
    """The number of the last watcher that was asked."""
    concerned: list[weakref.ref[Watcher]] = field(default_factory=list)
    reduced: Reduced = field(default_factory=Reduced)
    is_done: bool = False
    """Whether the watchers have been called for its present step already."""


class Steps:
    """The functions that torch calls, and the watchers that they call. Other threads may add watchers meanwhile."""

    def __init__(self) -> None:
        self._watchers: dict[int, weakref.ref[Watcher]] = {}
        """The watchers, by their numbers, in the order in which they were added; some may have died since the last was
        added. No function is called when one dies: an interrupt that came there would be lost."""
        self._last, self._adding = -1, Lock()
        self._looks: dict[int, _Look] = {}
        """The optimizers, by their ``id``. The dead are removed when another one is looked at."""
        self._parts: dict[int, weakref.ref[Optimizer]] = {}
        """Optimizers, by their ``id``, whose steps are at present parts of another one's, or were when that raised."""
        register_optimizer_step_pre_hook(torch.compiler.disable(self._before))  # type: ignore[no-untyped-call]
        register_optimizer_step_post_hook(torch.compiler.disable(self._after))  # type: ignore[no-untyped-call]

    def call(self, watcher: Watcher) -> None:
        """Have a watcher called, after those that are called already."""
        with self._adding:
            number = self._last + 1
            alive = {n: ref for n, ref in self._watchers.items() if ref() is not None}
            self._watchers = {**alive, number: weakref.ref(watcher)}
            self._last = number

    def watchers(self) -> list[Watcher]:
        """Return all live watchers, in the order in which they were added."""
        return _live(self._watchers.values())

    def _look(self, optimizer: Optimizer) -> _Look:
        """An optimizer, with all watchers that it concerns by now."""
        if not self._watchers:
            return _Look(weakref.ref(optimizer), [])
        params = _ids(optimizer)
        look = self._last_look(optimizer)
        if look is None or look.params != params:
            known = look.reduced.texts if look is not None else {}
            look = _Look(weakref.ref(optimizer), params, reduced=Reduced(known))
            alive = {number: other for number, other in [*self._looks.items()] if other.optimizer() is not None}
            self._looks = {**alive, id(optimizer): look}
        if look.last != (last := self._last):
            own = {id(param): param for group in optimizer.param_groups for param in group["params"]}
            new = [ref for number, ref in self._watchers.items() if look.last < number <= last]
            look.concerned += [ref for ref in new if (watcher := ref()) is not None and watcher.concerns(own)]
            look.last = last
        return look

    def _last_look(self, optimizer: Optimizer) -> _Look | None:
        look = self._looks.get(id(optimizer))
        return look if look is not None and look.optimizer() is optimizer else None

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        if (own := _of_this_rank(optimizer)) is not None:
            self._parts[id(own)] = weakref.ref(own)
        if weakref.ref(optimizer) in [*self._parts.values()]:
            return
        look = self._look(optimizer)
        look.is_done = False  # a step that raised may have left it
        for watcher in _live(look.concerned):
            watcher.before_step(optimizer)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if (own := _of_this_rank(optimizer)) is not None:
            self._parts.pop(id(own), None)
        look = self._last_look(optimizer)
        if look is None or not look.concerned or weakref.ref(optimizer) in [*self._parts.values()]:
            return
        if not look.is_done:
            self.reductions(optimizer).run()
        look.is_done = False

    def reductions(self, optimizer: Optimizer) -> Reductions:
        """Return the reductions of all watchers after the step of this optimizer. An optimizer that calls this runs
        them with its own, as its step ends."""
        look = self._look(optimizer)
        reductions = Reductions(look.reduced.compare if look.concerned else None)
        for watcher in _live(look.concerned):
            watcher.after_step(optimizer, reductions)
        look.is_done = True
        return reductions

    @contextmanager
    def part(self, optimizer: Optimizer) -> Iterator[None]:
        """Make the step of this optimizer a part of another optimizer's step, for which alone watchers are called."""
        self._parts[id(optimizer)] = weakref.ref(optimizer)
        try:
            yield
        finally:
            self._parts.pop(id(optimizer), None)


def _of_this_rank(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer that steps this rank's share of the parameters, as ZeroRedundancyOptimizer has one."""
    own = vars(optimizer).get("optim")
    return own if isinstance(own, Optimizer) and {*_ids(own)} <= {*_ids(optimizer)} else None


def _ids(optimizer: Optimizer) -> list[int]:
    return [number for group in optimizer.param_groups for number in map(id, group["params"])]


def _live(watchers: Iterable[weakref.ref[Watcher]]) -> list[Watcher]:
    return [watcher for ref in watchers if (watcher := ref()) is not None]


@cache
def steps() -> Steps:
    """The only instance, since torch's hooks are there once for all optimizers."""
    return Steps()
