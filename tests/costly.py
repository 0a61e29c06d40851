"""Which tests start a process or a compiler: they carry the marker ``starts``, and ``make test-fast`` leaves them out.
Where several processes run the tests, such ones come first.

Nobody has to think of it. A test whose code, or the code of its fixtures and helpers, names what starts one is marked
when it is collected; one that starts one without being marked (by a method, or deep in a library) fails, and the words
say to mark it by hand.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from lpq import testing

STARTERS = {
    *(("subprocess", name) for name in ("run", "Popen", "check_call", "check_output")),
    ("torch", "compile"), ("ranks", "spawn"), ("ranks", "processes"), ("pool", "Pool"),
}  # fmt: skip
"""Functions and classes that start a process or a compiler, or are there for it."""
OURS = (str(Path(__file__).parent), str(Path(testing.__file__).parent))
"""Where the code lies that is followed: that of the tests, and of the conformance kit."""
FONTS = "fc-list"
"""A program that any test of a plot may be the first one to start: matplotlib keeps its answer on the machine."""
WORDS = "this test starts {what}: mark it with @pytest.mark.starts, and make test-fast leaves it out"
current: list[str] = []
"""The test that runs and is not marked."""


def mark(item: pytest.Item) -> None:
    """Put the marker on a test that was collected, if it is one of those."""
    if isinstance(item, pytest.Function) and any(starts(function) for function in _functions(item)):
        item.add_marker("starts")


def _functions(item: pytest.Function) -> Iterator[FunctionType]:
    """The test, its fixtures, and the functions among its parameters."""
    fixtures = (one.func for many in item._fixtureinfo.name2fixturedefs.values() for one in many)
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return (f for f in (item.function, *fixtures, *given) if isinstance(f, FunctionType))


def starts(function: FunctionType) -> bool:
    """Whether a function, or one of those that it names, starts a process or a compiler."""
    seen, waiting = {function}, [function]
    while waiting:
        found = _named(waiting.pop())
        if None in found:
            return True
        waiting += found - seen
        seen |= found
    return False


@functools.cache
def _named(function: FunctionType) -> frozenset[Any]:
    """The functions of ours that a function names, and None for one that starts something."""
    return frozenset(one for value in _values(function.__code__, function.__globals__) for one in _meant(value))


def _values(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yield the value of each name in a function; for a module, its values of the other names.

    A name may be another object's attribute, and a module's may be another one's: then a test is marked in vain, which
    seldom happens, and to read the instructions of all functions would take seconds in each process that runs tests.
    """
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, ModuleType):
            yield from (vars(value)[other] for other in code.co_names if other in vars(value))
        else:
            yield value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _values(constant, names)


def _meant(value: Any) -> Iterator[FunctionType | None]:
    """None for a starter; the function of ours, or the methods of our class, that this is."""
    value = getattr(value, "__wrapped__", value)  # of a function that is cached, or makes a context
    if not isinstance(value, FunctionType | type):
        return
    if (value.__module__, value.__name__) in STARTERS:
        yield None
    for function in [value] if isinstance(value, FunctionType) else vars(value).values():
        if isinstance(function, FunctionType) and function.__code__.co_filename.startswith(OURS):
            yield function


def shared_out(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order in which none that takes long is left for the end, when the workers share the rest.

    Each worker begins with as long a stretch of them: first the files with many costly tests, dealt to the workers in
    turn, whole, as tests of a file share what they set up; then the others, of which idle workers take some. A test on
    a GPU is dealt by itself: most of its time goes to kernels that it alone compiles.
    """
    dealt: dict[object, list[pytest.Item]] = {}
    for item in items:
        dealt.setdefault(item.path if item.get_closest_marker("gpu") is None else item, []).append(item)
    costly_ones = [one for one, tests in dealt.items() if sum(map(is_costly, tests)) > len(tests) / 10]
    first = [[test for one in costly_ones[i::workers] for test in dealt[one]] for i in range(workers)]
    rest = [test for one, tests in dealt.items() if one not in {*costly_ones} for test in tests]
    found: list[pytest.Item] = []
    for i, own in enumerate(first):
        end = len(items) * (i + 1) // workers
        room = max(0, end - len(found) - len(own))
        found += own + rest[:room]
        del rest[:room]
    return found + rest


def is_costly(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("starts", "slow"))


def guard(patch: pytest.MonkeyPatch) -> None:
    """From now on what starts a process or a compiler fails in a test that is not marked.

    Not with a torch for CUDA: the first test that asks for the compiler of kernels looks for it by a process.
    """
    import torch  # which the process that hands out tests has no need of

    if torch.backends.cuda.is_built():
        return
    popen, process, compile_ = subprocess.Popen.__init__, multiprocessing.process.BaseProcess.start, torch.compile
    patch.setattr(subprocess.Popen, "__init__", _refusing(popen, "a process"))
    patch.setattr(multiprocessing.process.BaseProcess, "start", _refusing(process, "a process"))
    patch.setattr(torch, "compile", _refusing(compile_, "a compiler"))


def _refusing(function: Any, what: str) -> Any:
    @functools.wraps(function)
    def start(*args: Any, **kwargs: Any) -> Any:
        if current and FONTS not in str(args[1:]):  # the first one is the process
            pytest.fail(WORDS.format(what=what), pytrace=True)
        return function(*args, **kwargs)

    return start


@contextlib.contextmanager
def guarded(item: pytest.Item) -> Iterator[None]:
    """While this test runs, what starts one fails if it is not marked. On a GPU any test may compile kernels."""
    if item.get_closest_marker("starts") is None and item.get_closest_marker("gpu") is None:
        current.append(item.nodeid)
    try:
        yield
    finally:
        current.clear()
