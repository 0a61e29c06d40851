"""A run of tests names what failed before it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

def test_good(): pass
def test_bad(): assert 1 > 2, "one is less"
def test_worse(broken): pass
def test_last(): os._exit(9)
"""


@pytest.mark.parametrize("workers", [(), ("--numprocesses=1", "--maxprocesses=1")], ids=["one process", "a worker"])
def test_what_failed_is_named_though_the_run_is_cut_off(tmp_path: Path, workers: tuple[str, ...]) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "failing", "-p", "no:cacheprovider", "-p", "no:lpq"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run(
        [*command, *workers, f"--rootdir={tmp_path}", str(file)], env=environment, cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    named = [line for line in done.stdout.splitlines() if " failed: " in line]
    assert named[:2] == ["call failed: test_some.py::test_bad", "setup failed: test_some.py::test_worse"]
    assert re.search(r"test_some.py:\d+: AssertionError: one is less$", done.stdout, re.MULTILINE)
    assert "passed" not in done.stdout or workers  # without a worker nobody is left to sum up
