"""A run's trainer saves and loads checkpoints; ``tests/checkpoint`` shows that each is whole or refused in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from training import MakeConfig, saved

from lpq import checkpoint
from lpq.checkpoint import CheckpointError
from lpq.files import disk
from lpq.train.data import load
from lpq.train.team import Team
from lpq.train.trainer import Trainer

NAMES = ["step-00000001", "step-00000002"]


@pytest.fixture
def trainer(tiny: MakeConfig) -> Trainer:
    config = tiny(recipe="mxfp8")
    return Trainer(config, load(config.data, config.seq), None, Team(device=torch.device("cpu")))


def with_two(trainer: Trainer, directory: Path) -> Path:
    """Save after two steps each; the newer one."""
    for _ in range(2):
        trainer.advance()
        trainer.save(directory)
    return directory / NAMES[-1]


def silent(line: str) -> None:
    raise AssertionError(f"nothing should be said, but: {line}")


def truncate(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])


def test_a_checkpoint_that_was_saved_again_without_its_step_is_resumed(trainer: Trainer, tmp_path: Path) -> None:
    """By ``lpq.checkpoint.save``, with all that the run keeps beside."""
    with_two(trainer, tmp_path / "c")
    extra = checkpoint.info(tmp_path / "c").extra
    checkpoint.save(trainer.model, tmp_path / "d" / NAMES[-1], trainer.optimizer, extra=extra)
    losses, trainer.step, trainer.losses = trainer.losses, 0, []
    assert trainer.resume(tmp_path / "d", silent)
    assert (trainer.step, trainer.losses) == (2, losses)


def test_the_newest_is_loaded_and_two_are_kept(trainer: Trainer, tmp_path: Path) -> None:
    """As PyTorch alone reads it, too."""
    directory = tmp_path / "c"
    assert not trainer.resume(directory, silent)
    trainer.save(directory)
    with_two(trainer, directory)
    assert sorted(p.name for p in directory.iterdir()) == NAMES
    losses = trainer.losses
    trainer.step, trainer.losses = 0, []
    assert trainer.resume(directory, silent)
    assert (trainer.step, trainer.losses) == (2, losses)
    found = saved(directory, 2)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(found["tensors"]["model"][name], value)
    assert found["beside"]["extra"]["losses"] == losses
    assert json.loads((directory / NAMES[-1] / "lpq.json").read_text())["step"] == 2


def test_a_damaged_one_is_told_and_goes_once_the_run_went_on_without_it(trainer: Trainer, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    shutil.copytree(with_two(trainer, directory), directory / "step-00000009")
    truncate(directory / "step-00000009")
    said: list[str] = []
    assert trainer.resume(directory, said.append)
    assert trainer.step == 2
    (line,) = said
    assert "step-00000009 is refused" in line
    assert "truncated" in line
    trainer.advance()
    trainer.save(directory)
    assert sorted(p.name for p in directory.iterdir()) == ["step-00000002", "step-00000003"]
    for path in directory.iterdir():
        truncate(path)
    with pytest.raises(CheckpointError, match=r"(?s)03 is refused.*02 is refused.*No whole checkpoint is left"):
        trainer.resume(directory, silent)


def test_an_end_while_saving_leaves_the_previous_one(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "c"
    (directory / "step-00000001.partial").mkdir(parents=True)
    said: list[str] = []
    assert not trainer.resume(directory, said.append), "a first one that was never finished is no checkpoint"
    assert "never finished" in said[0]
    trainer.advance()
    trainer.save(directory)

    def publish(temporary: Path, path: Path) -> None:
        raise KeyboardInterrupt

    trainer.advance()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "publish", publish)
        with pytest.raises(BaseException):  # noqa: B017, PT011 - DCP wraps what it meets
            trainer.save(directory)
    assert trainer.resume(directory, lambda line: None)
    assert trainer.step == 1
    with_two(trainer, directory)  # and what was left behind is cleared away
    assert sorted(p.name for p in directory.iterdir()) == ["step-00000002", "step-00000003"]


def test_what_another_program_saved_is_not_gone_on_from(trainer: Trainer, tmp_path: Path) -> None:
    checkpoint.save(trainer.model, tmp_path / "c", trainer.optimizer, step=1, extra={"epoch": 1})
    with pytest.raises(CheckpointError, match="was not written by lpq train"):
        trainer.resume(tmp_path / "c", silent)
