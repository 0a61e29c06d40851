"""No Python runs when an object of lpq dies: Python drops an interrupt (Ctrl-C) that comes inside of it."""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from test_house import files, found_in, parsed
from torch import nn

import lpq

CALLED = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakMethod", "finalize", "__del__"}
"""Names of what has Python run then."""
REFERENCES = {"ref", "proxy", "KnownInput"}


def run_by_the_dead(source: str) -> list[int]:
    """The lines that have a function called when an object dies; ``partial`` of a method of a dict is no Python."""
    found = set()
    for node in ast.walk(parsed(source)):
        if _name(node) in CALLED:
            found.add(node.lineno)
        elif isinstance(node, ast.Call) and _name(node.func) in REFERENCES and len(node.args) == 2:
            back = node.args[1]
            if not (isinstance(back, ast.Call) and _name(back.func) == "partial"):
                found.add(node.lineno)
    return sorted(found)


def _name(node: Any) -> str | None:
    found: str | None = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
    return found


def test_nothing_asks_to_be_called() -> None:
    modules = files("lpq/**/*.py", "plugins/**/*.py")
    assert found_in(modules, lambda path: run_by_the_dead(path.read_text())) == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import weakref\nr = weakref.ref(x, lambda _: names.pop(n))", [2]),
        ("r = ref(x, self.gone)", [1]),
        ("d: weakref.WeakKeyDictionary[A, B] = weakref.WeakKeyDictionary()", [1]),
        ("class A:\n    def __del__(self): ...", [2]),
        ("weakref.finalize(self, close, made)", [1]),
        ("r = KnownInput(x, partial(self.pop, key)), ref(x), weakref.ref(y)", []),
    ],
)
def test_what_asks_to_be_called_is_noticed(source: str, lines: list[int]) -> None:
    assert run_by_the_dead(source) == lines


def test_an_input_that_layers_share_goes_without_python() -> None:
    """An interrupt that comes while its tensor dies is then raised where the program goes on."""
    model = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32)])
    lpq.convert(model, "mxfp8")
    x = torch.randn(32, 64)
    for layer in model:
        layer(x)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    inputs: Any = model[0].model.inputs
    assert len(inputs) == 1
    sys.setprofile(note)
    del x
    sys.setprofile(None)
    assert called == []
    assert len(inputs) == 0
