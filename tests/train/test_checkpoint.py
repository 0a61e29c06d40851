"""A checkpoint is whole or is refused, and the one before it serves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lpq.train import CheckpointError, checkpoint


def state(step: int) -> dict[str, object]:
    return {"step": step, "w": torch.full((1000,), float(step))}


def saved(directory: Path, *steps: int) -> list[Path]:
    return [checkpoint.save(directory, step, state(step)) for step in steps]


def silent(line: str) -> None:
    raise AssertionError(f"nothing should be said, but: {line}")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def unclose(path: Path) -> None:
    path.with_suffix(".json").unlink()


def scribble(path: Path) -> None:
    path.with_suffix(".json").write_text('{"step": 20')


DAMAGE = [
    (truncate, "truncated"),
    (flip, "SHA-256"),
    (unclose, "never finished"),
    (scribble, "manifest .* is damaged"),
]


def test_the_newest_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "absent", silent) is None
    saved(tmp_path, 5, 10, 20)
    loaded = checkpoint.load(tmp_path, silent)
    assert loaded is not None
    assert loaded["step"] == 20
    assert torch.equal(loaded["w"], torch.full((1000,), 20.0))
    names = ["step-00000010.json", "step-00000010.pt", "step-00000020.json", "step-00000020.pt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_one_is_refused_in_words_and_the_previous_one_serves(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    _, newest = saved(tmp_path, 10, 20)
    damage(newest)
    said: list[str] = []
    loaded = checkpoint.load(tmp_path, said.append)
    assert loaded is not None
    assert loaded["step"] == 10
    (line,) = said
    assert "step-00000020.pt is refused" in line
    assert re.search(words, line), line


def test_when_all_are_damaged_that_is_an_error(tmp_path: Path) -> None:
    for path in saved(tmp_path, 10, 20):
        truncate(path)
    with pytest.raises(CheckpointError, match=r"(?s)20\.pt is refused.*10\.pt is refused.*start a new run"):
        checkpoint.load(tmp_path, lambda line: None)


def test_a_first_one_that_was_never_finished_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-00000010.pt.partial").write_bytes(b"PK half of it")
    said: list[str] = []
    assert checkpoint.load(tmp_path, said.append) is None
    assert "never finished" in said[0]


@pytest.mark.parametrize("call", range(2))
def test_an_end_at_any_moment_of_saving_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    saved(tmp_path, 10)
    published = []
    real = checkpoint._publish

    def publish(temporary: Path, path: Path) -> None:
        if len(published) == call:
            raise KeyboardInterrupt
        published.append(path)
        real(temporary, path)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_publish", publish)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 20, state(20))
    loaded = checkpoint.load(tmp_path, lambda line: None)
    assert loaded is not None
    assert loaded["step"] == 10
    saved(tmp_path, 30)  # and what was left behind is cleared away
    assert sorted(p.name for p in tmp_path.glob("*.pt*")) == ["step-00000010.pt", "step-00000030.pt"]


def test_a_disk_that_takes_nothing_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"after step 10 could not be saved: .*free some space"):
        checkpoint.save(tmp_path / "file", 10, state(10))


def test_a_refused_one_does_not_outlive_the_run_that_went_on_without_it(tmp_path: Path) -> None:
    _, newest = saved(tmp_path, 10, 20)
    truncate(newest)
    saved(tmp_path, 15)
    loaded = checkpoint.load(tmp_path, silent)
    assert loaded is not None
    assert loaded["step"] == 15
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["step-00000010.pt", "step-00000015.pt"]
