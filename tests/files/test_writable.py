"""A file that somebody names is written in a folder that may be new; where it cannot be, that is told in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Command
from torch import nn

import lpq
from lpq.bench.knapsack import Option
from lpq.bench.search import SearchResult
from lpq.cli import bench
from lpq.files.errors import FileError
from lpq.files.outputs import check_writable
from lpq.observe import NumericsError, Readings
from lpq.registry.errors import LpqError
from lpq.train import compare, loop

FOUND = SearchResult(
    {"0": Option(("mxfp8",) * 3, lpq.recipe("mxfp8"), 1.0, 0.0)}, {"0": 2.0}, 0.1, 0.1, (), {"0": ["0"]}
)
WRITERS: dict[str, Callable[[Any], None]] = {
    "policy": FOUND.write,
    "readings": Readings().write,
    "page": Readings().page,
    "bench": lambda path: bench._write(path.parent, {}, None),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_folder_that_is_not_there_is_made(write: Callable[[Any], None], tmp_path: Path) -> None:
    write(tmp_path / "new" / "deeper" / "bench.json")
    assert (tmp_path / "new" / "deeper" / "bench.json").is_file()


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_place_that_cannot_be_written_is_told(write: Callable[[Any], None], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    other = "--out" if write is WRITERS["bench"] else "place"
    for kind in (LpqError, OSError):  # callers may catch either
        with pytest.raises(kind, match=rf"file/bench\.json cannot be written: .*; choose another {other}"):
            write(tmp_path / "file" / "bench.json")


@pytest.mark.parametrize("act", [Readings.read, Readings().write], ids=["read", "write"])
def test_a_file_that_cannot_be_read_is_told_so(
    act: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is to be written anew."""

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    (path := tmp_path / "numerics.jsonl").touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(FileError, match=r"numerics\.jsonl cannot be read: Permission denied"):
        act(path)


def test_a_place_is_tried_before_the_work_and_nothing_is_left(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("kept")
    (folder := tmp_path / "folder").mkdir()
    before = file.stat().st_mtime_ns
    for place in (file, folder / "new", tmp_path / "a" / "b" / "c"):
        check_writable(place, "choose another --out")
    for place, why in ((file / "in it", "Not a directory"), (folder, "Is a directory"), ("x" * 999, "name too long")):
        with pytest.raises(FileError, match=rf"cannot be written: .*{why}; choose another --out"):
            check_writable(place, "choose another --out")
    assert sorted(tmp_path.iterdir()) == [file, folder]
    assert [*folder.iterdir()] == []
    assert (file.read_text(), file.stat().st_mtime_ns) == ("kept", before)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("bench", "--device", "cpu", "--out", "{}"), r"file/bench\.json .*choose another --out"),
        (("search", "run", "--time", "1", "--gpu", "h100", "--out", "{}/p"), r"file/p .*choose another --out"),
        (("report", "{}s", "--out", "{}/page"), r"file/page .*choose another --out"),
        (("calibrate", "run", "{}/out"), r"out\.partial.* .*choose another directory"),
        (("compare", "mxfp8", "--out", "{}"), r"nothing can be kept in .*name another --out"),
        (("train", "--out", "{}"), r"no run can be kept in .*name another directory with --out"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_that_takes_its_time_finds_first_that_its_place_cannot_be_written(
    given: tuple[str, ...], words: str, tmp_path: Path, lpq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it reads a run or measures anything."""

    def work(*_: object) -> None:
        raise AssertionError("it works already")

    (tmp_path / "file").touch()
    (tmp_path / "files").touch()
    for module, name in ((bench, "measure"), (compare, "_run"), (loop, "beside_baseline"), (lpq.checkpoint, "info")):
        monkeypatch.setattr(module, name, work)
    monkeypatch.setattr(Readings, "read", work)
    ended = lpq_command(*(word.format(tmp_path / "file") for word in given))
    assert ended.status == 1
    assert re.search(words, " ".join(ended.err.split())), ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "files"}


def test_a_calibration_finds_first_that_its_state_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = lpq.convert(nn.Linear(32, 32), "fp8-current")
    with pytest.raises(LpqError, match=r"state\.partial.* cannot be written: Not a directory; choose another place"):
        lpq.calibrate(model, [], state=tmp_path / "file" / "state", forward=pytest.fail)


def test_a_report_has_another_place_for_its_page(tmp_path: Path, lpq_command: Command) -> None:
    watch = lpq.observe.numerics(model := lpq.convert(nn.Linear(32, 32), "mxfp8"), every=1)
    with watch.step():
        model(torch.ones(32, 32)).sum().backward()
    watch.write(run := tmp_path / "numerics.jsonl")
    (tmp_path / "numerics.html").mkdir()
    told = lpq_command("report", run)
    assert (told.status, "numerics.html cannot be written: Is a directory; choose another --out" in told.err) == (
        1,
        True,
    )
    ended = lpq_command("report", run, "--out", page := tmp_path / "new" / "page.html")
    assert (ended.status, f"the page is {page}" in ended.out) == (0, True)
    assert page.is_file()
    over = lpq_command("report", run, "--out", run)
    assert (over.status, "the page would be written over them" in over.err) == (2, True)


def test_a_file_of_other_bytes_is_refused_and_left(tmp_path: Path) -> None:
    (path := tmp_path / "picture").write_bytes(b"\x89PNG\n\xff\xfe")
    with pytest.raises(NumericsError, match="picture, line 1: this is no reading"):
        Readings().write(path)
    assert path.read_bytes() == b"\x89PNG\n\xff\xfe"


@pytest.mark.parametrize("write", [FOUND.write, Readings().write, Readings().page])
def test_what_is_no_path_is_refused(write: Callable[[Any], None]) -> None:
    with pytest.raises(LpqError, match="path must be str or Path, got NoneType"):
        write(None)
