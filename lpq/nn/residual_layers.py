"""Layers of a model in which norms add the residual: known by what they compute, and not by their class.

A layer of Llama computes ``x = x + attention(norm(x))`` and ``x = x + mlp(norm(x))``. A norm that encodes its output
can make the sum before it, too, and add gradients where they meet. So a layer is tried with stand-ins for its children.
If it calls them so, and no function of torch beside these sums, another forward stands for it, in which the norms add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpq.nn.extended import Extension, class_before, extend, restore
from lpq.nn.norms import EncodingNorm
from lpq.nn.stand_ins import Functions, has_written, is_another, settings_of, with_parts
from lpq.torch_private.hooks import global_hooks, hooks_of

MOST_CALLS = 16
"""The number of kinds of calls of which a layer keeps what it does."""
OTHER = "the forward of its block is not x + f(norm(x)), once or several times, and nothing else"
FAILS = "its block does not run with stand-ins for its parts"
HOOKED = "a backward hook is called with it"
SINCE = "lpq.fuse has not looked at its block as it is now: call lpq.fuse again"


class ArgumentAt(NamedTuple):
    """The place of an argument in a call of the layer, by its number or its name; None: what the branch has made."""

    of: int | str | None


class BranchCall(NamedTuple):
    """A call of a child in a branch."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Places, or constants."""
    several: bool
    """Whether it returns several values, the first of which goes on."""


class Branch(NamedTuple):
    """A norm of the stream, and the steps whose result is added to the stream."""

    norm: str
    steps: tuple[BranchCall, ...]


Course = tuple[Branch, ...]


class ResidualLayer(Extension, nn.Module):
    """A layer of another library that computes ``x + f(norm(x))`` one or several times; its norms add."""

    lpq_parts: dict[str, nn.Module | None]
    """Its children, as they were when it was fused."""
    lpq_several: tuple[str, ...]
    """The children that return several values."""
    lpq_courses: dict[object, Course | None]
    lpq_settings: tuple[tuple[str, Any], ...]
    """Its attributes, as they were when its courses were found."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take and return what the class before does."""
        course = None if torch.compiler.is_compiling() else self._course(args, kwargs)
        if course is None:
            return super().forward(*args, **kwargs)  # of the class before
        given: dict[int | str | None, Any] = dict(enumerate(args))
        given.update(kwargs)
        total, made = args[0], None
        for branch in course:
            norm: Any = self._modules[branch.norm]
            if _adds(norm):
                value, total = norm(total, with_sum=True) if made is None else norm(made, residual=total)
            else:
                total = total if made is None else total + made
                value = norm(total)
            for name, places, named, several in branch.steps:
                given[None] = value
                child: Any = self._modules[name]
                value = child(
                    *(given[a.of] if type(a) is ArgumentAt else a for a in places),
                    **{key: given[a.of] if type(a) is ArgumentAt else a for key, a in named.items()},
                )
                if several:
                    value = value[0]
            made = value
        return total + made

    def _course(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Course | None:
        """Return what the layer does in such a call; None: something else, or the norms cannot add."""
        if not args or not isinstance(args[0], Tensor) or self._modules != self.lpq_parts or global_hooks():
            return None
        key = (self.training, *map(_kind, args[1:]), *kwargs, *map(_kind, kwargs.values()))
        courses, own = self.lpq_courses, self.__dict__
        for name, value in self.lpq_settings:  # in a loop, as a call would cost each pass more
            now = own.get(name, courses)
            if now is not value and is_another(now, value):
                courses.clear()
                self.lpq_settings = settings_of(self)
                break
        if key not in courses:
            if len(courses) >= MOST_CALLS:
                courses.clear()
            found = _tried(self, self.lpq_several, args, kwargs)
            courses[key] = None if isinstance(found, str) else found
        return courses[key]


def _kind(value: Any) -> Any:
    """Return all by which a layer may decide of an argument: such a value itself, or that there is one."""
    return value if value is None or isinstance(value, bool) else ArgumentAt


def _adds(norm: Any) -> bool:
    """Whether a module is a norm that can add a residual: nobody looks at what it is given."""
    return isinstance(norm, EncodingNorm) and "forward" not in vars(norm) and not any(hooks_of(norm))


def extend_residual(layer: nn.Module) -> None:
    """Have the norms of a layer add the residual, if it computes nothing else beside them and its branches."""
    if isinstance(layer, ResidualLayer):
        if layer._modules == layer.lpq_parts:
            layer.lpq_courses.clear()
            return
        release_residual(layer)
    if isinstance(layer, Extension) or not _norms(layer):
        return
    try:
        found = _found(layer)
    except _Asked:
        return
    if isinstance(found, tuple):
        extend(layer, ResidualLayer)
        layer.__dict__.update(lpq_parts=dict(layer._modules), lpq_several=found, lpq_courses={})
        layer.__dict__["lpq_settings"] = settings_of(layer)


def release_residual(layer: ResidualLayer) -> None:
    """Make a layer what it was."""
    restore(layer)
    for name in ("lpq_parts", "lpq_several", "lpq_courses", "lpq_settings"):
        del layer.__dict__[name]


def who_adds(model: nn.Module) -> dict[int, str]:
    """For the address of each norm that ``fuse`` adopted, words about what is added before it."""
    words: dict[int, str] = {}
    for layer in model.modules():
        for norm in _norms(layer):
            why = _why_apart(layer, norm)
            words[id(norm)] = "it adds the residual, too" if why is None else f"torch adds what is added before: {why}"
    return words


def _why_apart(layer: nn.Module, norm: EncodingNorm) -> str | None:
    """Why a norm of a layer does not add; None if it does."""
    if not _adds(norm):
        return HOOKED
    if isinstance(layer, ResidualLayer):
        return None if layer._modules == layer.lpq_parts else SINCE
    try:
        found = _found(layer)
    except _Asked:
        return None
    return found if isinstance(found, str) else SINCE


def _norms(layer: nn.Module) -> list[EncodingNorm]:
    return [child for child in layer._modules.values() if isinstance(child, EncodingNorm) and child.places]


def _found(layer: nn.Module) -> tuple[str, ...] | str:
    """The children of a layer that return several values, if it fits; or why it does not."""
    if "forward" in vars(layer):
        return OTHER
    names = [
        name for name, child in layer._modules.items() if child is not None and not isinstance(child, EncodingNorm)
    ]
    why = FAILS
    for several in chain.from_iterable(combinations(names, count) for count in range(3)):
        found = _tried(layer, several, [None], {})
        if not isinstance(found, str):
            return several
        why = OTHER if OTHER in (found, why) else FAILS
    return why


class _Asked(Exception):
    """A layer asks its norms for sums itself."""


class _Trial:
    """The calls of children, in their order, and the numbers that they return."""

    def __init__(self, count: int) -> None:
        self.calls: list[_ChildCall] = []
        drawn = torch.Generator().manual_seed(0)
        self.numbers = iter([torch.randn(1, 2, 64, generator=drawn).mul(4).bfloat16() for _ in range(count)])


class _Called(nn.Module):
    """Takes the place of a child: it notes each call, and returns other numbers each time."""

    def __init__(self, name: str, of: nn.Module, several: bool, trial: _Trial) -> None:
        super().__init__()
        self.name, self.of, self.several, self.trial = name, of, several, trial

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.of, EncodingNorm) and kwargs.keys() & {"residual", "with_sum"}:
            raise _Asked
        made = next(self.trial.numbers)
        self.trial.calls.append(_ChildCall(self, args, kwargs, made))
        return (made, None) if self.several else made


class _ChildCall(NamedTuple):
    child: _Called
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Tensor

    def gets(self, value: Tensor | None) -> bool:
        return value is not None and any(given is value for given in (*self.args, *self.kwargs.values()))

    def step(self, value: Tensor) -> BranchCall | None:
        """This call as a step of a branch that has made ``value``; None if it is given more than steps are."""
        args = tuple(ArgumentAt(None) if a is value else a for a in self.args)
        kwargs = {name: ArgumentAt(None) if a is value else a for name, a in self.kwargs.items()}
        if not all(isinstance(a, ArgumentAt | bool | int | float | str | None) for a in (*args, *kwargs.values())):
            return None
        return BranchCall(self.child.name, args, kwargs, self.child.several)


def _tried(layer: nn.Module, several: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Course | str:
    """Return what a layer does with such arguments, the first of which is the stream; or why that is something else."""
    base: Any = class_before(layer)
    children = layer._modules.items()
    trial = _Trial(2 * len(children) + 1)
    x = next(trial.numbers)
    parts = {name: None if m is None else _Called(name, m, name in several, trial) for name, m in children}
    like, before, functions = with_parts(layer, base, parts), x.clone(), Functions()  # type: ignore[arg-type]
    given = [ArgumentAt(i) if _kind(value) is ArgumentAt else value for i, value in enumerate(args)]
    named = {name: ArgumentAt(name) if _kind(value) is ArgumentAt else value for name, value in kwargs.items()}
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), functions:
            out = base.forward(like, x, *given[1:], **named)
    except _Asked:
        raise
    except Exception:  # other code's, which may raise anything on such arguments
        return FAILS
    if has_written(like, layer):
        return OTHER
    course = _read(trial.calls, x, out)
    return course if course and len(course) == functions.count and torch.equal(x, before) else OTHER


def _read(calls: Sequence[_ChildCall], x: Tensor, out: Any) -> Course:
    """The branches that these calls are, where their sums make ``out`` of ``x``; none if they are something else."""
    branches: list[Branch] = []
    total, value = x, None
    for call in calls:
        if call.gets(value):
            assert value is not None
            step = call.step(value)
            if step is None:
                return ()
            branches[-1] = Branch(branches[-1].norm, (*branches[-1].steps, step))
        else:
            total = total if value is None else total + value
            if call.kwargs or call.child.several or len(call.args) != 1 or not _same(call.args[0], total):
                return ()
            branches.append(Branch(call.child.name, ()))
        value = call.made
    return tuple(branches) if value is not None and _same(out, total + value) else ()


def _same(given: Any, expected: Tensor) -> bool:
    return isinstance(given, Tensor) and torch.equal(given, expected)
