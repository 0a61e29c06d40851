"""Layers of a model in which norms add the residual: known by what they compute, and not by their class.

A layer of Llama computes ``x = x + attention(norm(x))`` and ``x = x + mlp(norm(x))``. A norm that encodes its output
can make the sum before it, too, and add gradients where they meet. So a layer is tried with stand-ins for its children.
If it calls them so, and no function of torch beside these sums, another forward stands for it, in which the norms add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpq.nn.extended import Extension, class_before, extend, restore
from lpq.nn.followed_norms import REPLACED
from lpq.nn.norms import NO_WEIGHT, EncodingNorm
from lpq.nn.stand_ins import Read, Trial, aside, changed, numbers
from lpq.nn.unwrapping import children_inside, inside_of
from lpq.operations.norm_kernels import gradient_threads
from lpq.torch_private.compiling import outside_graphs
from lpq.torch_private.dispatch import transforms
from lpq.torch_private.hooks import global_hooks, hooks_of

MOST_CALLS = 16
"""The number of kinds of calls of which a layer keeps what it does."""
OTHER = "the forward of its block is not x + f(norm(x)), once or several times, and nothing else"
FAILS = "its block does not run with stand-ins for its parts"
ASKS = "its block asks it for the sum"
HOOKED = "a hook is called with it"
SINCE = "lpq.fuse has not looked at its block as it is now: call lpq.fuse again"
CALLED = "in the calls so far, its block computes something else, or an argument decides what"


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


class KindOfCall(NamedTuple):
    """A kind of calls of a layer, in each of which it does the same."""

    course: Course | None
    """None: something else than sums of branches."""
    reads: tuple[Read, ...]
    """The attributes by which it decided that."""


class ResidualLayer(Extension, nn.Module):
    """A layer of another library that computes ``x + f(norm(x))`` one or several times; its norms add."""

    lpq_parts: dict[str, nn.Module | None]
    """Its children, as they were when it was fused."""
    lpq_several: tuple[str, ...]
    """The children that return several values."""
    lpq_either: tuple[str, ...]
    """The children of which it takes the first value where they return several."""
    lpq_calls: dict[object, KindOfCall]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take and return what the class before does."""
        course = None if torch.compiler.is_compiling() else self._course(args, kwargs)
        if course is None:
            return super().forward(*args, **kwargs)  # of the class before
        arguments: dict[int | str | None, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        total, output = args[0], None
        for branch in course:
            norm: Any = self._modules[branch.norm]
            if _adds(norm):
                value, total = norm(total, with_sum=True) if output is None else norm(output, residual=total)
            else:
                total = total if output is None else total + output
                value = norm(total)
            for name, places, named, several in branch.steps:
                arguments[None] = value
                child: Any = self._modules[name]
                value = child(
                    *(arguments[a.of] if type(a) is ArgumentAt else a for a in places),
                    **{key: arguments[a.of] if type(a) is ArgumentAt else a for key, a in named.items()},
                )
                if several or (name in self.lpq_either and not isinstance(value, Tensor)):
                    value = value[0]
            output = value
        return total + output

    def _course(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Course | None:
        """Return what the layer does in such a call; None: something else, or the norms cannot add."""
        if not args or not isinstance(args[0], Tensor) or "forward" in vars(self) or global_hooks() or transforms():
            return None
        if self._modules != self.lpq_parts and children_inside(self) != self.lpq_parts:
            return None
        key = (self.training, *map(_kind, args[1:]), *kwargs, *map(_kind, kwargs.values()))
        kind = self.lpq_calls.get(key)
        if kind is None or (kind.reads and changed(kind.reads) is not None):
            if len(self.lpq_calls) >= MOST_CALLS:
                self.lpq_calls.clear()
            course, reads = _tried(self, self.lpq_several, args, kwargs)
            kind = self.lpq_calls[key] = KindOfCall(None if isinstance(course, str) else course, reads)
        return kind.course


def _kind(value: Any) -> Any:
    """Return all by which a layer may decide of an argument: such a value itself, or that there is one."""
    return value if value is None or isinstance(value, bool) else ArgumentAt


def _adds(norm: Any) -> bool:
    """Whether a module is a norm that can add a residual: nobody looks at what it is given."""
    return isinstance(norm, EncodingNorm) and "forward" not in vars(norm) and not any(hooks_of(norm))


def extend_residual(layer: nn.Module) -> None:
    """Have the norms of a layer add the residual, if it computes nothing else beside them and its branches."""
    if "forward" in vars(layer):
        return
    if isinstance(layer, ResidualLayer):
        if children_inside(layer) == layer.lpq_parts:
            layer.lpq_calls.clear()
            return
        release_residual(layer)
    if isinstance(layer, Extension) or not _norms(layer):
        return
    several = _several_or_why(layer)
    if isinstance(several, tuple):
        extend(layer, ResidualLayer)
        own = {"lpq_parts": children_inside(layer), "lpq_several": several, "lpq_either": _either(layer, several)}
        vars(layer).update(own, lpq_calls={})


def release_residual(layer: ResidualLayer) -> None:
    """Make a layer what it was."""
    restore(layer, "lpq_parts", "lpq_several", "lpq_either", "lpq_calls")


def who_adds(model: nn.Module) -> dict[int, str]:
    """For the address of each norm that ``fuse`` adopted, words about what is added before it."""
    words: dict[int, str] = {}
    several, first = cache(_several_or_why), cache(_first_norm)  # a layer is tried once for all its norms
    for layer in model.modules():
        for norm in _norms(layer):
            why = _why_apart(layer, norm, several)
            words[id(norm)] = f"torch adds what is added before: {why}" if why else _who_adds_at(layer, norm, first)
    return words


def _first_norm(layer: ResidualLayer) -> nn.Module | None:
    """The norm of the first branch of a layer."""
    courses = [kind.course for kind in layer.lpq_calls.values() if kind.course]
    course = courses[0] if courses else _tried(layer, layer.lpq_several, [None], {})[0]
    return layer._modules[course[0].norm] if isinstance(course[0], Branch) else None


def _who_adds_at(layer: nn.Module, norm: EncodingNorm, first: Callable[[ResidualLayer], nn.Module | None]) -> str:
    """Words about the sum before a norm that can add, and about the gradients behind it."""
    before = "it adds the residual where its block gives it one"
    if isinstance(layer, ResidualLayer):
        before = "torch adds what is added before its layer" if first(layer) is norm else "it adds the residual"
    weight: Any = norm._parameters["weight"]
    has_kernel = gradient_threads(norm.norm, weight.shape[0], weight.dtype) is not None
    who, why = "it" if has_kernel else "torch", ""
    if not (has_kernel or norm.norm.centers):
        why = f", as no kernel takes gradients of {weight.shape[0]} columns in {weight.dtype}"
    return f"{before}, and {who} adds the gradients that meet there in backward{why}"


def _why_apart(
    layer: nn.Module, norm: EncodingNorm, several_or_why: Callable[[nn.Module], tuple[str, ...] | str]
) -> str | None:
    """Why a norm of a layer does not add; None if it does."""
    if "forward" in vars(layer):
        return REPLACED
    if not _adds(norm):
        return HOOKED
    if norm._parameters.get("weight") is None:
        return NO_WEIGHT
    if isinstance(layer, ResidualLayer):
        courses = [kind.course for kind in layer.lpq_calls.values() if changed(kind.reads) is None]
        why = CALLED if courses and not any(courses) else None
        return why if children_inside(layer) == layer.lpq_parts else SINCE
    result = several_or_why(layer)
    return SINCE if not isinstance(result, str) else None if result is ASKS else result


def _norms(layer: nn.Module) -> list[EncodingNorm]:
    """The norms of a layer that ``fuse`` adopted; of a wrapper of torch there are none."""
    if inside_of(layer) is not None:
        return []
    return [child for child in layer._modules.values() if isinstance(child, EncodingNorm) and child.places]


def _several_or_why(layer: nn.Module) -> tuple[str, ...] | str:
    """The children of a layer that return several values, if it computes sums of branches; or why it does not."""
    why = FAILS
    for several in chain.from_iterable(combinations(_branches(layer), count) for count in range(3)):
        course, _ = _tried(layer, several, [None], {})
        if not isinstance(course, str):
            return several
        if course is ASKS:
            return ASKS
        why = OTHER if OTHER in (course, why) else FAILS
    return why


def _either(layer: nn.Module, several: tuple[str, ...]) -> tuple[str, ...]:
    """The children of which the layer takes the first value where they return several, though they need not."""
    others = [name for name in _branches(layer) if name not in several]
    return tuple(name for name in others if isinstance(_tried(layer, (*several, name), [None], {})[0], tuple))


def _branches(layer: nn.Module) -> list[str]:
    """The names of the children that are no norms that encode."""
    children = layer._modules.items()
    return [name for name, child in children if child is not None and not isinstance(child, EncodingNorm)]


class _Asked(Exception):
    """A layer asks its norms for sums itself."""


class _Argument:
    """Stands for an argument, or for a value that a child returns beside the first: nothing may be found out about it,
    as another call may have another one."""

    def __init__(self, of: int | str) -> None:
        vars(self)["of"] = of

    def _is_decided_by(self, *_: object) -> Any:
        raise TypeError("a layer decides by an argument")

    __getattr__ = __eq__ = __hash__ = __bool__ = __str__ = __format__ = _is_decided_by
    __class__ = property(_is_decided_by)


class _Several(tuple[Any, ...]):
    """The values that a child returns: it may return any number of others."""

    __len__ = __bool__ = _Argument._is_decided_by


class _Called(nn.Module):
    """Takes the place of a child: it notes each call, and returns other numbers each time."""

    def __init__(
        self, name: str, of: nn.Module, beside: tuple[object, ...], outputs: Iterator[Tensor], calls: list[_ChildCall]
    ) -> None:
        """``beside``: the values that it returns beside a tensor. ``calls``: the calls of all children, in order."""
        super().__init__()
        del self.training  # as a ``StandIn``
        self.name, self.of, self.beside, self.outputs, self.calls = name, of, beside, outputs, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.of, EncodingNorm) and kwargs.keys() & {"residual", "with_sum"}:
            raise _Asked
        output = next(self.outputs)
        self.calls.append(_ChildCall(self, args, kwargs, output))
        return _Several((output, *self.beside)) if self.beside else output


class _ChildCall(NamedTuple):
    child: _Called
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def gets(self, value: Tensor | None) -> bool:
        return value is not None and any(argument is value for argument in (*self.args, *self.kwargs.values()))

    def step(self, value: Tensor) -> BranchCall | None:
        """This call as a step of a branch that has made ``value``; None if it is given more than steps are."""

        def place(a: Any) -> Any:
            return ArgumentAt(None) if a is value else ArgumentAt(vars(a)["of"]) if type(a) is _Argument else a

        args, kwargs = tuple(map(place, self.args)), {name: place(a) for name, a in self.kwargs.items()}
        if not all(isinstance(a, ArgumentAt | bool | int | float | str | None) for a in (*args, *kwargs.values())):
            return None
        return BranchCall(self.child.name, args, kwargs, bool(self.child.beside))


@outside_graphs  # a compiler that leaves the layer eager would trace it
def _tried(
    layer: nn.Module, several: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Course | str, tuple[Read, ...]]:
    """Return what a layer does with such arguments, the first of which is the stream, or why that is something else;
    and the attributes by which it decides that."""
    with aside():
        course, reads = _run(layer, several, args, kwargs, None)
        if several and not isinstance(course, str):  # whatever else its children return
            other, _ = _run(layer, several, args, kwargs, _Argument("beside"))
            course = course if other == course else OTHER
    return course, reads


def _run(
    layer: nn.Module, several: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], beside: object
) -> tuple[Course | str, tuple[Read, ...]]:
    trial, tensors = Trial(grads=True), iter([t.requires_grad_().clone() for t in numbers(2 * len(layer._modules) + 1)])
    x, calls = next(tensors), list[_ChildCall]()

    def stand_for(parent: nn.Module, name: str, child: nn.Module) -> nn.Module:
        return _Called(name, child, (beside,) if name in several else (), tensors, calls)

    arguments = [_Argument(i) if _kind(value) is ArgumentAt else value for i, value in enumerate(args)]
    named = {name: _Argument(name) if _kind(value) is ArgumentAt else value for name, value in kwargs.items()}
    before = x.detach().clone()
    try:
        like = trial.copy(layer, stand_for)
        with trial:
            out = class_before(layer).forward(like, x, *arguments[1:], **named)
    except _Asked:
        return ASKS, trial.of(layer)
    except Exception:  # other code's, which may raise anything on such arguments
        return FAILS, trial.of(layer)
    decides = trial.shows_little() or trial.attribute_reads or not torch.equal(x, before)
    course = () if decides else _branches_of(calls, x, out)
    given_to = [a for call in calls for a in call.args if type(a) is not _Argument and isinstance(a, Tensor)]
    fits = course and len(course) == trial.count and _adds_alone([out, *given_to])
    return course if fits else OTHER, trial.of(layer)


def _adds_alone(values: Sequence[Tensor]) -> bool:
    """Whether autograd has nothing but sums behind these tensors: another function may have other gradients."""
    nodes: list[Any] = [value.grad_fn for value in values]
    while nodes:
        node = nodes.pop()
        name = type(node).__name__
        if name == "AddBackward0":
            nodes += [following for following, _ in node.next_functions]
        elif name != "CloneBackward0":  # of the numbers of the trial
            return False
    return True


def _branches_of(calls: Sequence[_ChildCall], x: Tensor, out: Any) -> Course:
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
            if call.kwargs or call.child.beside or len(call.args) != 1 or not _same(call.args[0], total):
                return ()
            branches.append(Branch(call.child.name, ()))
        value = call.output
    return tuple(branches) if value is not None and _same(out, total + value) else ()


def _same(value: Any, expected: Tensor) -> bool:
    return isinstance(value, Tensor) and torch.equal(value, expected)
