"""Triton's interpreter without work that it does again and again with the same result.

By itself it makes a type for the result of each operation, and a table of NumPy's dtypes whenever it needs one. Here it
remembers both. When a kernel starts it replaces the functions of the language, and again, by the same ones, in each
function that the kernel calls. Here they stay replaced until the kernel ends. ``interpreted_quickly.py`` compares
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


def patched_once() -> Callable[[Any], Any]:
    """Return a ``_patch_lang`` that replaces the functions of the language once a kernel."""
    patch_language, patched = interpreter._patch_lang, set[ModuleType]()

    def patch(function: Any) -> Any:
        new = {value for value in function.__globals__.values() if value is tl or value is tl.core} - patched
        if not new:
            return SimpleNamespace(restore=lambda: None)
        scope = patch_language(function)
        patched.update(new)
        restore = scope.restore
        scope.restore = lambda: (restore(), patched.clear())
        return scope

    return patch
