"""The rule of ``costly.py``: what starts a process or a compiler is marked, and what is not marked cannot."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import costly
import pytest
import torch

THERE = torch
"""Another name for it, so that nothing here is found to compile."""


def starts(function: Any) -> bool:
    assert isinstance(function, FunctionType)
    return costly.starts(function)


def test_the_process_that_hands_out_tests_imports_no_torch() -> None:
    """The processes that run tests start once it has imported both files ``conftest.py`` of the folder."""
    here = Path(__file__).parent
    code = "import sys, conftest; sys.path.insert(0, 'testing'); del sys.modules['conftest']; import conftest"
    command = [sys.executable, "-c", f"{code}; print(conftest.__file__, 'torch' in sys.modules)"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert done.stdout.split() == [str(here / "testing/conftest.py"), "False"], done.stderr


def _runs() -> None:
    subprocess.run(["true"], check=True)


def _by_a_helper() -> None:
    _runs()


class Runner:
    def run(self) -> None:
        subprocess.Popen(["true"])


def _by_a_method() -> None:
    Runner().run()


@contextlib.contextmanager
def _while_it_runs():
    _runs()
    yield


def _inside() -> None:
    def run() -> None:
        with _while_it_runs():
            pass

    run()


def _compiles() -> None:
    torch.compile(torch.nn.Linear(2, 2))


def _neither() -> None:
    assert sys.executable
    assert subprocess.PIPE
    assert not hasattr(torch, "run")


def test_what_starts_one_is_found() -> None:
    for function in (_runs, _by_a_helper, _by_a_method, _inside, _compiles):
        assert starts(function), function
    assert not starts(_neither)


@pytest.fixture
def ran() -> None:
    _runs()


def test_one_that_starts_is_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("starts") is not None
    _runs()


@pytest.mark.usefixtures("ran")
def test_one_whose_fixture_starts_is_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("starts") is not None


@pytest.mark.parametrize("function", [_runs])
def test_one_whose_parameter_starts_is_marked(function: Any, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("starts") is not None
    function()


def test_one_that_starts_nothing_is_not_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("starts") is None


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="with a torch for CUDA nothing is guarded")
@pytest.mark.parametrize("what", ["process", "compiler"])
def test_one_that_is_not_marked_cannot_start_any(what: str) -> None:
    start = {"process": getattr(subprocess, "check" + "_call"), "compiler": getattr(THERE, "compile")}[what]  # noqa: B009
    with pytest.raises(pytest.fail.Exception, match=rf"this test starts a {what}: mark it with @pytest\.mark\.starts"):
        start(["true"] if what == "process" else torch.nn.Linear(2, 2))


def test_a_plot_may_ask_for_fonts() -> None:
    """matplotlib does so once on a machine, in whichever test draws the first plot there."""
    assert costly.current  # so a process of another program would be refused
    with contextlib.suppress(FileNotFoundError):
        getattr(subprocess, "check" + "_output")(["fc-list", "--help"])


class Item:
    """A test, as far as its order goes."""

    def __init__(self, file: str, *markers: str) -> None:
        self.path, self.markers = file, markers

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def test_costly_files_come_first_for_each_worker_and_stay_whole() -> None:
    light = [Item(file) for file in "aabbbcccccc"]
    long = [Item("d"), Item("d", "slow"), Item("e", "starts"), Item("f", "gpu"), Item("g", "starts")]
    given: list[Any] = [*light, *long]
    for workers in (2, 3, 20):
        found = costly.shared_out(given, workers)
        assert sorted(map(id, found)) == sorted(map(id, given))
        text = "".join(str(item.path) for item in found)
        assert text == {2: "ddgaabbbeccccccf", 3: "ddaabebbccgccccf", 20: "ddegaabbbccccccf"}[workers]
    few: list[Any] = [*(Item("a") for _ in range(10)), Item("a", "starts"), Item("b", "starts")]
    assert [str(item.path) for item in costly.shared_out(few, 2)] == ["b", *"aaaaaaaaaaa"]
    kit: list[Any] = [Item("a"), Item("b"), *(Item("k", "starts", "gpu") for _ in range(4)), Item("a"), Item("b")]
    assert "".join(str(item.path) for item in costly.shared_out(kit, 2)) == "kkaakkbb"  # dealt one by one
