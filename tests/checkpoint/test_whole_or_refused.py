"""A checkpoint is whole or is refused in words, and the one before it serves. Files and damage are real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from killed import MOMENTS, kill_in_every_moment, loaded, model, names, saved, truncate, untold, value
from ranks import processes

from lpq import checkpoint
from lpq.checkpoint import CheckpointError, CheckpointWarning, NoCheckpoint
from lpq.files import claim, disk


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def edit(path: Path) -> None:
    """A deliberate change of one weight, in a file that remains a good one."""
    raw = path.read_bytes()
    assert torch.tensor([20.0]).numpy().tobytes() in raw
    path.write_bytes(raw.replace(torch.tensor([20.0]).numpy().tobytes(), torch.tensor([21.0]).numpy().tobytes(), 1))


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    """A run's directory, when ``step=`` is forgotten; another one; a file."""
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").touch()
    (tmp_path / "file").touch()
    saved(tmp_path / "run", 1, 2)
    before = sorted(tmp_path.rglob("*"))
    for name, words in (("run", "give step= to save one in it"), ("else", "give step="), ("file", "file is a file")):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.save(model(3.0), tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    for number in (1.0, 2.0):
        assert checkpoint.load(model(0.0), checkpoint.save(model(number), tmp_path / "empty")).step is None


def test_a_link_to_a_checkpoint_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    (archived,) = saved(tmp_path / "archive", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / archived.name).symlink_to(archived)
    saved(tmp_path / "run", 2)
    with pytest.warns(CheckpointWarning, match="leaves links in .*: step-00000001"):
        checkpoint.save(model(3.0), tmp_path / "run", step=3, keep=1)
    assert names(tmp_path / "run") == [archived.name, "step-00000003"]
    assert checkpoint.load(model(0.0), archived).step == 1


FILES = ("__0_0.distcp", "index.json", ".metadata", "lpq.json", "extra.pt")
DAMAGE: list[tuple[Callable[[Path], None], str, str]] = [
    *((truncate, name, "so it is truncated") for name in FILES),
    *((flip, name, "SHA-256") for name in FILES),
    *((Path.unlink, name, "is missing") for name in FILES),
    (edit, "__0_0.distcp", "SHA-256"),
    (truncate, "manifest.json", "manifest.json is damaged"),
    (Path.unlink, "manifest.json", "it has no manifest.json"),
]


@pytest.mark.parametrize(("damage", "name", "words"), DAMAGE)
def test_damage_is_found_before_anything_is_loaded(
    tmp_path: Path, damage: Callable[[Path], None], name: str, words: str
) -> None:
    _, newest = saved(tmp_path, 10, 20)
    damage(newest / name)
    net = model(0.0)
    with pytest.raises(CheckpointError, match=rf"step-00000020 is refused: .*{words}"):
        checkpoint.load(net, newest)
    assert value(net) == 0.0
    with pytest.warns(CheckpointWarning, match=rf"20 is refused: .*{words}.*; step-00000010 is loaded in its place"):
        info = checkpoint.load(net, tmp_path)
    assert (value(net), info.step) == (10.0, 10)
    assert len(info.refused) == 1


def test_what_is_whole_is_loaded_without_a_word(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 100_000_000)
    with untold():
        assert loaded(tmp_path) == 100_000_000.0
        assert checkpoint.load(model(0.0), tmp_path / "step-00000010").refused == ()


def test_when_all_are_damaged_that_is_an_error(tmp_path: Path) -> None:
    for path in saved(tmp_path, 10, 20):
        truncate(path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"(?s)20 is refused.*10 is refused.*No whole checkpoint") as raised:
        checkpoint.load(model(0.0), tmp_path)
    assert not isinstance(raised.value, NoCheckpoint), "a run must not start anew in silence"


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(model(1.0).state_dict(), path)
    for read in (checkpoint.info, lambda path: checkpoint.load(model(0.0), path)):
        with pytest.raises(CheckpointError, match=r"model\.pt is a file, and a checkpoint is a directory.*import_file"):
            read(path)


def test_the_others_of_the_run_are_named_where_one_is_not_whole(tmp_path: Path) -> None:
    damaged = saved(tmp_path, 5, 10, 20)[-1]
    truncate(damaged / "__0_0.distcp")
    others = "step-00000010, step-00000005: load .*, of which the newest whole one is taken"
    with pytest.raises(CheckpointError, match=rf"(?s)20 is refused.*Beside it there is {others}") as raised:
        checkpoint.load(model(0.0), damaged)
    assert "No whole checkpoint" not in str(raised.value)
    with pytest.raises(NoCheckpoint, match=rf"no checkpoint in .*30\. Beside it there is step-00000020, {others}"):
        checkpoint.load(model(0.0), tmp_path / "step-00000030")
    truncate(checkpoint.save(model(1.0), tmp_path / "latest") / "lpq.json")
    with pytest.raises(CheckpointError, match="No whole checkpoint is left there"):
        checkpoint.load(model(0.0), tmp_path / "latest")


def test_where_there_never_was_one_a_run_may_start(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match=r"there is no checkpoint in .*nowhere: there is no such folder$"):
        checkpoint.load(model(0.0), tmp_path / "nowhere")
    with pytest.raises(NoCheckpoint, match=r"there is no checkpoint in [^:]*$"):
        checkpoint.load(model(0.0), tmp_path)
    others = tmp_path / "others"
    others.mkdir()
    (others / "config.json").write_text("{}")
    with pytest.raises(NoCheckpoint, match=r"config\.json among them: load it with the library that wrote"):
        checkpoint.load(model(0.0), others)
    (tmp_path / "step-00000010.partial").mkdir()
    with pytest.raises(NoCheckpoint, match="never finished"):
        checkpoint.load(model(0.0), tmp_path)
    with pytest.raises(NoCheckpoint, match="never finished"):
        checkpoint.load(model(0.0), tmp_path / "step-00000010")


def test_a_process_killed_while_saving_leaves_the_previous_one(tmp_path: Path) -> None:
    processes(kill_in_every_moment, 1, tmp_path)
    for moment in MOMENTS:
        _previous_one_serves(tmp_path / moment, MOMENTS[moment][-1])


def _previous_one_serves(run: Path, step: int) -> None:
    assert (run / f"step-{step:08d}.partial").is_dir(), run
    net = model(0.0)
    if step == 20:
        with pytest.raises(CheckpointError, match="it was never finished"):
            checkpoint.load(net, run / "step-00000020")
        with pytest.warns(CheckpointWarning, match="it was never finished"):
            info = checkpoint.load(net, run)
    else:
        info = checkpoint.load(net, run)
    assert (value(net), info.step) == (1.0, 10), run
    checkpoint.save(model(3.0), run, step=step)  # and what was left behind is no hindrance
    assert [p.name for p in sorted(run.iterdir()) if p.name.endswith(f"{step}")] == [f"step-{step:08d}"]
    assert not list(run.glob("*.partial"))
    assert not list(run.glob("*.replaced"))
    assert loaded(run) == 3.0


def test_one_takes_the_place_of_another(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        assert checkpoint.save(model(number), tmp_path / "latest") == tmp_path / "latest"
    assert loaded(tmp_path / "latest") == 2.0
    assert names(tmp_path) == ["latest"]


def test_so_many_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    (tmp_path / "step-00000005.partial").mkdir()
    (tmp_path / "step-00000005.partial" / claim.LOCK).touch()
    (tmp_path / "notes").mkdir()
    words = "run went back to step-00000025, and keep=2 will remove .* at the next save: step-00000030"
    with pytest.warns(CheckpointWarning, match=words):
        checkpoint.save(model(25.0), tmp_path, step=25, keep=2)
    assert names(tmp_path) == ["notes", *(f"step-000000{n}" for n in (20, 25, 30))]
    with untold():
        checkpoint.save(model(27.0), tmp_path, step=27, keep=2)
    assert names(tmp_path) == ["notes", "step-00000025", "step-00000027"]


def test_a_disk_that_takes_nothing_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="step-00000010 could not be saved, and those before it"):
        checkpoint.save(model(1.0), tmp_path / "file", step=10)


def test_an_interrupt_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 10)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, "digest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(model(20.0), tmp_path, step=20)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
