"""The core of lpq does not grow unnoticed, and each file counts for one subject."""

from __future__ import annotations

import pytest
from lines import LPQ, SUBJECTS, by_subject, length, lines, of_the_core
from test_house import files

MOST = 41_849
"""The lines of the core. A change that needs more takes others away, or is a subject of its own in ``SUBJECTS``."""


def test_the_core_does_not_grow() -> None:
    assert of_the_core() <= MOST


def test_each_file_counts_once() -> None:
    counted = [path for paths in by_subject().values() for path in paths]
    assert sorted(counted) == files("lpq/**/*.py")
    assert sum(lines().values()) == sum(map(length, counted))
    assert all(lines()[subject] for subject in SUBJECTS)


def test_a_file_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUBJECTS, "rounding", "formats/rounding_of_old.py")
    with pytest.raises(FileNotFoundError, match=r"no file of lpq is formats/rounding_of_old\.py"):
        by_subject()
    assert (LPQ / "core.py").exists()
