"""Lets the tests of this folder import the formats of those on several ranks, and run pytest inside this process."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test as one that may compile, by the fixture below: ``costly.py`` does not see what that imports."""
    item.add_marker("starts")


@pytest.fixture(autouse=True)
def compiler_is_imported(request: pytest.FixtureRequest) -> None:
    """Compile something before a run inside this process. Afterwards all modules are taken out that were not there
    before, and a compiler's cannot be imported a second time: they raise, and Triton's library ends the process."""
    if "pytester" in request.fixturenames:
        _compile_once()


@cache
def _compile_once() -> None:
    import torch  # which the process that hands out tests has no need of

    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    importlib.import_module("torch._inductor.compile_fx")
