"""Triton's interpreter without work that it does again and again with the same result.

By itself it makes a type and a shape for the result of each operation, and a table of NumPy's dtypes whenever it needs
one. Here it remembers them. To compare two shapes it copies one, and whether a value is a constant it asks four times;
here it does neither. When a kernel starts it replaces the functions of the language, and again, by the same ones, in
each function that the kernel calls. Here they stay replaced until the kernel ends. ``interpreted_quickly.py`` compares
results with the results of Triton's own interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs Triton")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


@contextmanager
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if hasattr(interpreter, "_LangPatchScope"):  # a Triton without it undoes them in another way
            monkeypatch.setattr(interpreter, "_patch_lang", patched_once())
        blocks = interpreter.InterpreterBuilder
        remember(monkeypatch, interpreter, "_get_np_dtype", element_name)
        remember(monkeypatch, blocks, "get_block_ty", lambda _, element, shape: (element_name(element), *shape))
        remember(monkeypatch, tl.block_type, "with_element_ty", lambda ty, element: (element_name(element), *ty.shape))
        monkeypatch.setattr(tl.tensor, "__init__", with_known_shapes(tl.tensor.__init__))
        monkeypatch.setattr(tl.tuple, "__eq__", comparing_integers(tl.tuple.__eq__))
        monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", asking_once(tl.core._unwrap_if_constexpr))
        yield


@pytest.fixture(autouse=True, scope="module")
def _quick_interpreter() -> Iterator[None]:
    """For the tests of each module that imports it."""
    with quick_interpreter():
        yield


def element_name(ty: Any) -> Hashable:
    """Tell a type from others: the name of a pointer leaves out where it points to."""
    return ty.name, getattr(ty, "address_space", None)


def remember(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, key: Callable[..., Hashable]) -> None:
    """Have a function that only returns something called one time for all arguments that have the same key."""
    function, results = getattr(owner, name), dict[Hashable, Any]()

    def remembered(*args: Any) -> Any:
        known = key(*args)
        if known not in results:
            results[known] = function(*args)
        return results[known]

    monkeypatch.setattr(owner, name, remembered)


def with_known_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Return the ``__init__`` of tensors that makes what depends on the shape alone once for each shape."""
    results: dict[Hashable, dict[str, Any]] = {}

    def __init__(self: Any, handle: Any, type: Any) -> None:
        shape = (*type.shape,) if type.is_block() else ()
        known = results.get(shape)
        if known is None:
            make(self, handle, type)
            results[shape] = {name: vars(self)[name] for name in ("shape", "numel")}
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            vars(self).update(known)

    return __init__


def asking_once(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that takes constants out of a value, which leaves most values as they are."""
    kinds = (list, tuple, tl.tuple, tl.constexpr)
    return lambda value: unwrap(value) if isinstance(value, kinds) else value


def comparing_integers(equal: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the ``__eq__`` of Triton's tuples that compares the sizes of blocks without a copy of them."""

    def __eq__(self: Any, other: Any) -> Any:
        if type(other) is tl.tuple and all(type(value) is int for value in other.values):
            return tl.constexpr(self.values == other.values)
        return equal(self, other)

    return __eq__


def patched_once() -> Callable[[Any], Any]:
    """Return a ``_patch_lang`` that replaces the functions of the language once a kernel."""
    patch_language, patched = interpreter._patch_lang, set[ModuleType]()
    named: dict[int, set[ModuleType]] = {}

    def patch(function: Any) -> Any:
        names = function.__globals__  # of a module, which stays
        if id(names) not in named:
            named[id(names)] = {value for value in names.values() if value is tl or value is tl.core}
        new = named[id(names)] - patched
        if not new:
            return SimpleNamespace(restore=lambda: None)
        scope = patch_language(function)
        patched.update(new)
        restore = scope.restore
        scope.restore = lambda: (restore(), patched.clear())
        return scope

    return patch
