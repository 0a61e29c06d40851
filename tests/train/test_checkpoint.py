"""A run's checkpoints: whole or refused in words, and the one before serves. The format has its own tests."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import opcodes
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
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
    return Trainer(config, load(config.data, config.seq), None, Team(torch.device("cpu")))


def with_two(trainer: Trainer, directory: Path) -> Path:
    """Save after two steps each; the newer one."""
    for _ in range(2):
        trainer.advance()
        trainer.save(directory)
    return directory / NAMES[-1]


def silent(line: str) -> None:
    raise AssertionError(f"nothing should be said, but: {line}")


def data(path: Path) -> Path:
    (found,) = path.glob("*.distcp")
    return found


def truncate(path: Path) -> None:
    data(path).write_bytes(data(path).read_bytes()[:-100])


def flip(path: Path) -> None:
    raw = bytearray(data(path).read_bytes())
    raw[len(raw) // 2] ^= 1
    data(path).write_bytes(raw)


def unclose(path: Path) -> None:
    (path / "manifest.json").unlink()


def scribble(path: Path) -> None:
    (path / "manifest.json").write_text('{"step": 20')


DAMAGE = [
    (truncate, "truncated"),
    (flip, "SHA-256"),
    (unclose, "has no manifest"),
    (scribble, "manifest.json is damaged"),
]


def test_the_newest_is_loaded_and_two_are_kept(trainer: Trainer, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    assert not trainer.resume(directory, silent)
    trainer.save(directory)
    with_two(trainer, directory)
    assert sorted(p.name for p in directory.iterdir()) == NAMES
    losses = trainer.losses
    trainer.step, trainer.losses = 0, []
    assert trainer.resume(directory, silent)
    assert (trainer.step, trainer.losses) == (2, losses)


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_one_is_refused_in_words_and_the_previous_one_serves(
    trainer: Trainer, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(with_two(trainer, tmp_path / "c"))
    said: list[str] = []
    assert trainer.resume(tmp_path / "c", said.append)
    assert trainer.step == 1
    (line,) = said
    assert "step-00000002 is refused" in line
    assert re.search(words, line), line


def test_when_all_are_damaged_that_is_an_error(trainer: Trainer, tmp_path: Path) -> None:
    with_two(trainer, tmp_path / "c")
    for name in NAMES:
        truncate(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=r"(?s)02 is refused.*01 is refused.*No whole checkpoint is left"):
        trainer.resume(tmp_path / "c", silent)


def test_a_first_one_that_was_never_finished_is_no_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "c" / "step-00000001.partial").mkdir(parents=True)
    said: list[str] = []
    assert not trainer.resume(tmp_path / "c", said.append)
    assert "never finished" in said[0]


def test_an_end_while_saving_leaves_the_previous_one(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "c"
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


def test_a_disk_that_takes_nothing_is_an_error_in_words(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"step-00000000 could not be saved.*Free some space"):
        trainer.save(tmp_path / "file")


def test_a_refused_one_does_not_outlive_the_run_that_went_on_without_it(trainer: Trainer, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    newest = with_two(trainer, directory)
    shutil.copytree(newest, directory / "step-00000009")
    truncate(directory / "step-00000009")
    said: list[str] = []
    assert trainer.resume(directory, said.append)
    assert "step-00000009 is refused" in said[0]
    trainer.advance()
    trainer.save(directory)
    assert sorted(p.name for p in directory.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_checkpoint_is_what_pytorch_reads_alone(trainer: Trainer, tmp_path: Path) -> None:
    with_two(trainer, tmp_path / "c")
    found = saved(tmp_path / "c", 2)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(found["tensors"]["model"][name], value)
    assert found["beside"]["extra"]["losses"] == trainer.losses
    assert json.loads((tmp_path / "c" / NAMES[-1] / "lpq.json").read_text())["step"] == 2


def test_what_another_program_saved_is_not_gone_on_from(trainer: Trainer, tmp_path: Path) -> None:
    checkpoint.save(trainer.model, tmp_path / "c", trainer.optimizer, step=1, extra={"epoch": 1})
    with pytest.raises(CheckpointError, match="was not written by lpq train"):
        trainer.resume(tmp_path / "c", silent)


def test_going_on_from_a_file_that_would_run_code_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    path = opcodes.as_version_1(with_two(trainer, tmp_path / "c"))
    opcodes.put(path, ".metadata", opcodes.two_faced(path, tmp_path / "ran"))
    trainer.step = 0
    with pytest.raises(CheckpointError, match=r"its index \(\.metadata\) is refused"):
        trainer.resume(tmp_path / "c", silent)
    assert trainer.step == 0
    assert not (tmp_path / "ran").exists()
    assert not hasattr(BytesStorageMetadata, "__setstate__")
