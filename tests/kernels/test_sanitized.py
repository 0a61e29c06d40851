"""``make test-sanitized``: its checks name tests that exist, and one that saw nothing run has failed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "sanitized.py"
STANDS_IN = """#!/bin/sh
echo "========= ERROR SUMMARY: 0 errors"
echo "$*" | grep -q rht && echo "1 passed in 0.1s" || echo "1 skipped in 0.1s"
"""


def test_its_checks_name_tests_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    sanitized = importlib.import_module("sanitized")
    checks = list(sanitized.checks())
    assert {check.tool for check in checks} == {"memcheck", "racecheck", "synccheck", "initcheck"}
    named = {test for check in checks for test in check.tests if "::" in test}
    assert len(named) == 6
    for test in named:
        path, function = test.partition("[")[0].split("::")
        assert f"def {function}(" in (ROOT / path).read_text()


def test_a_check_whose_tests_were_skipped_has_failed(tmp_path: Path) -> None:
    sanitizer = tmp_path / "sanitizer"
    sanitizer.write_text(STANDS_IN)
    sanitizer.chmod(0o755)
    command = [sys.executable, str(SCRIPT), f"--sanitizer={sanitizer}", "--only", "racecheck (rht|mxfp8)$"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "racecheck rht: 0 errors; 1 passed" in done.stdout
    assert "racecheck mxfp8: FAILED" in done.stdout
    assert "1 of 2 checks found nothing" in done.stdout
