"""Only what lpq wrote is emptied, replaced or removed: the files of others stay where they are, and are named."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from killed import loaded, model, names
from torch import nn

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError, CheckpointWarning, writing
from lpq.files import claim, disk


def converted(recipe: str = "mxfp8") -> nn.Module:
    return lpq.convert(nn.Sequential(nn.Linear(32, 32, bias=False)), recipe)


def calibrated(path: Path) -> None:
    lpq.calibrate(converted("fp8-current"), [torch.ones(4, 32)], state=path, progress=False)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "save": lambda path: checkpoint.save(model(1.0), path),
    "save_async": lambda path: checkpoint.save_async(model(1.0), path).wait(),
    "export": lambda path: lpq.export(converted(), path),
    "one file": lambda path: lpq.export(model(1.0), path, layout="lpq"),
    "calibrate": calibrated,
}
"""All that writes something that is whole or does not count."""
writers = pytest.mark.parametrize("write", [pytest.param(write, id=name) for name, write in WRITERS.items()])


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def notes(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine")
    return folder


@writers
def test_a_directory_of_others_beside_it_is_not_emptied(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    notes(tmp_path / "a.partial")
    with pytest.raises(lpq.registry.errors.LpqError, match=r"holds notes\.txt, which lpq did not write: move it away"):
        write(tmp_path / "a")
    assert tree(tmp_path) == ["a.partial/notes.txt"]
    (tmp_path / "a.partial" / claim.LOCK).touch()  # as a process leaves it that was killed
    write(tmp_path / "a")
    assert not (tmp_path / "a.partial").exists()


@writers
def test_what_fails_leaves_nothing_behind(
    tmp_path: Path, write: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        assert (tmp_path / "a.partial").is_dir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish", full)
        with pytest.raises(lpq.registry.errors.LpqError, match="No space left on device"):
            write(tmp_path / "a")
    assert tree(tmp_path) == []
    assert not (tmp_path / "a.partial").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="the system limits no files")
@pytest.mark.parametrize("room", [0, 600])
@writers
def test_what_the_system_does_not_write_is_told_and_written_later(
    tmp_path: Path, write: Callable[[Path], Any], room: int
) -> None:
    """By the same process, which gave the place back: also where there was no room for the lock's own line."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(lpq.registry.errors.LpqError, match="File too large"):
            write(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "a").exists()
    write(tmp_path / "a")
    assert names(tmp_path) == ["a"]


@writers
def test_a_link_is_written_to_where_it_points(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    (tmp_path / "link").symlink_to("elsewhere")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere").exists()
    assert names(tmp_path) == ["elsewhere", "link"]


def test_what_could_not_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    def fails(*_: object) -> None:
        monkeypatch.setattr(claim, "_empty", stuck)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "publish", fails)

    def save() -> None:
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(model(1.0), tmp_path / "a")

    with pytest.warns(CheckpointWarning, match=r"a\.partial is not finished, and cannot be removed: Device"):
        save()


def test_the_directory_of_others_that_is_in_the_way_of_the_one_before(tmp_path: Path) -> None:
    notes(tmp_path / "b.replaced")
    checkpoint.save(model(1.0), tmp_path / "b")  # which moves nothing aside
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"b\.replaced, where .* is kept meanwhile, is not lpq's: move it away"):
        checkpoint.save(model(2.0), tmp_path / "b")
    assert tree(tmp_path) == before


def test_what_lies_in_a_checkpoint_that_is_replaced_stays_there(tmp_path: Path) -> None:
    own = checkpoint.save(model(1.0), tmp_path / "own")
    ours = tree(own)
    notes(own)
    notes(own / "tokenizer")
    with pytest.warns(
        CheckpointWarning, match=r"but for files that lpq did not write: .*own/notes\.txt, .*own/tokenizer"
    ):
        checkpoint.save(model(2.0), own)
    assert tree(own) == sorted([*ours, "notes.txt", "tokenizer/notes.txt"])
    assert names(tmp_path) == ["own"]
    assert loaded(own) == 2.0


def test_what_lies_in_a_checkpoint_that_is_removed_stays_there(tmp_path: Path) -> None:
    first = checkpoint.save(model(1.0), tmp_path, step=1)
    notes(first)
    with pytest.warns(CheckpointWarning, match=rf"{first.name} was removed but for .*: .*{first.name}/notes\.txt"):
        checkpoint.save(model(2.0), tmp_path, step=2, keep=1)
    assert tree(first) == ["notes.txt"]


def test_a_removal_that_ends_half_way_goes_on(tmp_path: Path) -> None:
    first = checkpoint.save(model(1.0), tmp_path, step=1)
    (first / "extra.pt").unlink()
    checkpoint.save(model(2.0), tmp_path, step=2, keep=1)
    assert names(tmp_path) == ["step-00000002"]


def test_a_manifest_that_names_files_elsewhere_removes_none(tmp_path: Path) -> None:
    first = checkpoint.save(model(1.0), tmp_path / "run", step=1)
    notes(tmp_path)
    manifest = first / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"__0_0.distcp"', '"../../notes.txt"'))
    with pytest.warns(CheckpointWarning, match=r"did not write: .*__0_0\.distcp"):
        checkpoint.save(model(2.0), tmp_path / "run", step=2, keep=1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_checkpoints_of_other_programs_stay(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (500, 1000):
            dcp.save(model(0.0).state_dict(), checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    notes(tmp_path / "step-00000007.partial")
    before = tree(tmp_path)
    with pytest.warns(CheckpointWarning, match=r"keep=2 leaves .*: step-00000007\.partial, step-500, step-1000"):
        last = checkpoint.save(model(1.0), tmp_path, step=1001, keep=2)
    assert {*before} < {*tree(tmp_path)}
    with pytest.raises(CheckpointError, match="is no checkpoint that could be replaced"):
        checkpoint.save(model(1.0), tmp_path / "step-500")
    assert checkpoint.load(model(0.0), last).step == 1001


def test_what_was_there_is_back_where_a_save_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = checkpoint.save(model(1.0), tmp_path / "a")
    before = tree(tmp_path)

    def fails(*_: object) -> None:
        assert not there.exists()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writing.Claim, "publish", fails)
    with pytest.raises(CheckpointError, match=r"and those before it are as they were: .*Input/output"):
        checkpoint.save(model(2.0), there)
    assert tree(tmp_path) == before


def test_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("saved", "exported", "converted", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "saved")
    checkpoint.save(model(1.0), ".")
    for path in (".", "../saved", "../saved/../saved/."):
        assert loaded(Path(path)) == 1.0
        assert checkpoint.info(path).step is None
    assert Path.cwd() == tmp_path / "saved"
    with pytest.raises(CheckpointError, match="is the current directory"):
        checkpoint.save(model(2.0), ".")
    monkeypatch.chdir(tmp_path / "exported")
    lpq.export(converted(), ".")
    assert "config.json" in [path.name for path in Path().iterdir()]
    monkeypatch.chdir(tmp_path / "converted")
    checkpoint.save(converted(), ".")
    assert lpq.export(".", "../exported-again").layers
    monkeypatch.chdir(tmp_path / "run")
    for number in (1, 2):
        checkpoint.save(model(1.0), ".", step=number)
    assert checkpoint.load(model(0.0), ".").step == 2
    with pytest.raises(CheckpointError, match="directory is empty: give a place on the disk"):
        checkpoint.save(model(1.0), "")
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(CheckpointError, match="is the root of a file system"):
        checkpoint.save(model(1.0), "/")


def test_a_name_that_no_load_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the name of an unfinished one"):
        checkpoint.save(model(1.0), tmp_path / "a.partial")
