"""The checkpoints of a run: which is loaded, which stay, and who may write one."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from killed import loaded, model, names, saved, step, truncate, untold

from lpq import checkpoint
from lpq.checkpoint import CheckpointError, CheckpointWarning, writing
from lpq.files import claim, disk

# ------------------------------------------------------------------------------ which is loaded


def test_after_a_run_went_back_what_was_written_last_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 10, 20, 30)
    monkeypatch.setattr(time, "time_ns", lambda: 5)  # a clock that was put back, too
    with untold():
        assert loaded(tmp_path) == 30.0
    checkpoint.save(model(21.0), tmp_path, step=20)
    words = rf"{step(20)} is loaded, which was written last: {step(30)} beside it is of a later step"
    with pytest.warns(CheckpointWarning, match=words):
        assert loaded(tmp_path) == 21.0
    with pytest.warns(CheckpointWarning, match=words):
        info = checkpoint.info(tmp_path)
    assert info.step == 20
    assert info.why in str(info)
    assert loaded(tmp_path / step(30)) == 30.0  # which has a path of its own
    truncate(tmp_path / step(20) / "extra.pt")
    with pytest.warns(CheckpointWarning, match=rf"{step(20)} is refused"):
        assert loaded(tmp_path) == 30.0
    checkpoint.save(model(40.0), tmp_path, step=40)
    with untold():
        assert loaded(tmp_path) == 40.0


def test_checkpoints_that_do_not_tell_when_they_were_written_go_by_their_steps(tmp_path: Path) -> None:
    for path in saved(tmp_path, 20, 10):
        said = json.loads((path / "manifest.json").read_text())
        del said["written"]
        (path / "manifest.json").write_text(json.dumps(said))
    assert loaded(tmp_path) == 20.0
    checkpoint.save(model(5.0), tmp_path, step=5)
    with pytest.warns(CheckpointWarning, match=rf"{step(20)}, {step(10)} beside it are of later steps"):
        assert loaded(tmp_path) == 5.0


# ------------------------------------------------------------------------------ which stay


def test_only_whole_ones_are_counted(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    truncate(tmp_path / step(20) / "__0_0.distcp")
    (tmp_path / step(30) / "manifest.json").unlink()
    with pytest.warns(CheckpointWarning, match=rf"leaves .* directories without a manifest\.json of lpq's: {step(30)}"):
        checkpoint.save(model(40.0), tmp_path, step=40, keep=2)
    assert names(tmp_path) == [step(10), step(30), step(40)]


def test_what_is_no_checkpoint_is_neither_removed_nor_replaced(tmp_path: Path) -> None:
    for number in (5, 10):
        (tmp_path / step(number)).mkdir()
        (tmp_path / step(number) / "manifest.json").write_text('{"name": "a web page"}')
        (tmp_path / step(number) / "picture.png").touch()
    with pytest.raises(CheckpointError, match="no checkpoint that could be replaced: give another directory"):
        checkpoint.save(model(10.0), tmp_path, step=10)
    with pytest.raises(CheckpointError, match="no checkpoint that could be replaced: give step="):
        checkpoint.save(model(10.0), tmp_path / step(5))
    with pytest.warns(CheckpointWarning, match=rf"{step(5)}, {step(10)}"):
        checkpoint.save(model(20.0), tmp_path, step=20, keep=1)
    assert names(tmp_path) == [step(5), step(10), step(20)]
    assert names(tmp_path / step(5)) == ["manifest.json", "picture.png"]


# ------------------------------------------------------------------------------ who writes

OTHER = """
import sys
from pathlib import Path
from killed import model
from lpq import checkpoint
from lpq.files import disk
def full(path): raise OSError("the disk is full")
try:
    checkpoint.save(model(2.0), Path(sys.argv[1]), step=10, keep=1)
except checkpoint.CheckpointError as error:
    print(error)
disk.digest = full
checkpoint.save_async(model(2.0), Path(sys.argv[2]), step=11)
"""
"""Is refused, and then leaves a save in the background to itself, which fails."""


def test_two_jobs_that_save_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds the first at it, is refused, and takes nothing away from it."""
    checkpoint.save(model(0.0), tmp_path, step=10)
    other: list[subprocess.CompletedProcess[str]] = []
    real = writing.CheckpointWriter.finish

    def slow(*args: Any, **options: Any) -> None:
        """While the first one writes, another process tries the same; and this one, for another model."""
        environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-c", OTHER, str(tmp_path), str(tmp_path / "elsewhere")]
        other.append(subprocess.run(command, capture_output=True, text=True, check=True, env=environment))
        monkeypatch.setattr(writing.CheckpointWriter, "finish", real)
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* is saving it at this moment"):
            checkpoint.save(model(3.0), tmp_path, step=10)
        checkpoint.save(model(4.0), tmp_path, step=20, keep=1)  # whose tidying leaves it alone, too
        real(*args, **options)

    monkeypatch.setattr(writing.CheckpointWriter, "finish", slow)
    with pytest.warns(
        CheckpointWarning, match=rf"{step(10)} is this process's.*process \d+ on .*, process {os.getpid()}"
    ):
        checkpoint.save(model(1.0), tmp_path, step=10)
    (done,) = other
    assert f"process {os.getpid()} on" in done.stdout
    assert "is saving it at this moment, and the checkpoint will be that one's" in done.stdout
    assert f"{step(11)} could not be saved" in done.stderr  # told when the process ended
    assert "the disk is full" in done.stderr
    assert "(nobody called Saving.wait)" in done.stderr
    assert loaded(tmp_path / step(10)) == 1.0
    assert claim.LOCK not in names(tmp_path / step(10))
    checkpoint.save(model(5.0), tmp_path, step=10)
    assert loaded(tmp_path / step(10)) == 5.0


def test_the_lock_of_a_save_that_failed_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for save in (checkpoint.save, lambda *args, **options: checkpoint.save_async(*args, **options).wait()):
        with monkeypatch.context() as patch:
            patch.setattr(disk, "digest", lambda path: (_ for _ in ()).throw(OSError("the disk is full")))
            with pytest.raises(CheckpointError, match="the disk is full"):
                save(model(1.0), tmp_path, step=1)
        assert names(tmp_path) == []
        assert save(model(2.0), tmp_path, step=1) == tmp_path / step(1)
        assert names(tmp_path) == [step(1)]
        shutil.rmtree(tmp_path / step(1))


def test_a_directory_that_is_no_directory_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / f"{step(1)}.partial").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="is there and is no directory: move it away"):
        checkpoint.save(model(1.0), tmp_path, step=1)


# ------------------------------------------------------------------------------ what nobody waited for


def failed(folder: Path, number: int) -> checkpoint.Saving:
    """A save in the background that has failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "digest", lambda path: (_ for _ in ()).throw(OSError("the disk is full")))
        saving = checkpoint.save_async(model(1.0), folder, step=number)
        saving._future.exception()
    return saving


def test_a_save_that_failed_and_was_not_waited_for_is_told(tmp_path: Path) -> None:
    words = rf"{step(1)} could not be saved, and those before it are as they were: .*the disk is full"
    saving = failed(tmp_path, 1)
    with pytest.warns(CheckpointWarning, match=words):
        assert saving.done()
    with pytest.raises(CheckpointError, match=words):
        saving.wait()
    failed(tmp_path, 2)
    gc.collect()  # whether anybody has it still or not
    with pytest.warns(
        CheckpointWarning, match=rf"{step(2)} could not be saved.*disk is full.*nobody called Saving\.wait"
    ):
        checkpoint.save(model(3.0), tmp_path, step=3)
    with untold():
        assert loaded(tmp_path / step(3)) == 3.0  # and it was saved
        with pytest.raises(CheckpointError):
            failed(tmp_path, 4).wait()
        checkpoint.save(model(5.0), tmp_path, step=5)  # what was told is told once
        checkpoint.save_async(model(6.0), tmp_path, step=6)._future.result()
        checkpoint.save(model(7.0), tmp_path, step=7)
