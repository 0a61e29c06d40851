"""A run small enough to train many times over in a test."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from training import MakeConfig

from lpq.train import TrainConfig, report

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # the helpers for several processes


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Something to train on that is there in every test."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}, and {i} cubed is {i**3}.\n" for i in range(400)))
    return path


@pytest.fixture
def tiny(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    """Configurations of a tiny run; every name given to ``out`` is a directory of its own.

    No plot is drawn, which would take a third of the time.
    """
    monkeypatch.setattr(report, "draw", lambda *args: "no plot")

    def make(out: str = "run", **options: object) -> TrainConfig:
        small = {
            "layers": 1,
            "heads": 2,
            "width": 32,
            "seq": 16,
            "batch": 2,
            "steps": 6,
            "checkpoint_every": 2,
            "second_seed": False,
        }
        given = {"device": "cpu", "data": (str(text),), "out": str(tmp_path / out), **small, **options}
        return TrainConfig(**given)  # type: ignore[arg-type]

    return make


@pytest.fixture
def console() -> Console:
    """A console whose text ``shown`` reads."""
    return Console(file=io.StringIO(), width=200)
