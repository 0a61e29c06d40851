"""The directory of a run that fails early: what a user had in it stays, to the last byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from rich.console import Console
from training import MakeConfig

from lpq.train import TrainConfig, TrainError, loop, run, runs
from lpq.train.machine import baseline_on
from lpq.train.trainer import Trainer

STAGES = {
    "policy": (loop, "policy_of"),
    "text": (loop.data, "load"),
    "model": (loop, "Trainer"),
    "conversion": (loop.lpq, "report"),
    "checkpoints": (Trainer, "resume"),
    "metrics": (loop, "keep"),
    "first step": (Trainer, "advance"),
}


class Broken(Exception):
    pass


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory with a user's files, some of which look like a run's."""
    out = tmp_path / "run"
    for name in ("notes.md", "other/metrics.jsonl", "step-00000001/data", "other/step-00000002/data"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("" if name.endswith("jsonl") else "mine")
    (out / "empty").mkdir()
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_whatever_fails_what_was_there_stays(
    stage: str, theirs: Path, tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise Broken

    before = snapshot(theirs)
    with monkeypatch.context() as patched:
        patched.setattr(*STAGES[stage], fails)
        with pytest.raises(Broken):
            run(tiny(), console)
        assert snapshot(theirs) == before
        with pytest.raises(Broken):
            run(tiny("fresh"), console)
        assert not (theirs.parent / "fresh").exists()
    if stage == "first step":  # so the same command can be given again
        run(tiny(steps=1, baseline=False), console)
        assert before.items() <= snapshot(theirs).items()


@pytest.mark.parametrize("name", [*runs.OWN[1:], "recipe/metrics.jsonl", "bf16/step-00000001/x"])
def test_what_a_run_would_write_to_is_refused(name: str, tmp_path: Path) -> None:
    """An empty conversion.txt was overwritten and then removed; checkpoints under recipe/ were resumed from."""
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.touch()
    before = snapshot(tmp_path)
    with (
        pytest.raises(
            TrainError, match=rf"run already holds {name.partition('/')[0]}, which a run would write to: mov"
        ),
        runs.opened(TrainConfig(out=str(tmp_path / "run"))),
    ):
        raise AssertionError
    assert snapshot(tmp_path) == before


def test_an_empty_directory_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for name in ("run", "link"):
        with pytest.raises(Broken), runs.opened(TrainConfig(out=str(tmp_path / name))):
            raise Broken
        assert snapshot(tmp_path) == {"run": None, "link": None}
    target = tmp_path / "elsewhere"
    (tmp_path / "run" / runs.CONFIG).symlink_to(target)
    with pytest.raises(TrainError, match="already holds a run"):
        runs.open_directory(TrainConfig(out=str(tmp_path / "run")))
    assert os.path.lexists(tmp_path / "run" / runs.CONFIG)
    assert not target.exists()


def test_settings_that_cannot_be_written_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: TrainConfig) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrainConfig, "to_toml", full)
    with pytest.raises(TrainError, match=r"no run can be kept in .*No space left"):
        runs.open_directory(TrainConfig(out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_every_training_has_its_folder() -> None:
    assert {runs.RECIPE, baseline_on(torch.device("cpu")), baseline_on(torch.device("cuda"))} <= set(runs.TRAININGS)
