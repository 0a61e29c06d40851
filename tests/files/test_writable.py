"""A file that somebody names is written in a folder that may be new; where it cannot be, that is told in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lpq
from lpq.bench.knapsack import Option
from lpq.bench.search import SearchResult
from lpq.cli import bench
from lpq.files.errors import FileError
from lpq.observe import NumericsError, Readings
from lpq.registry.errors import LpqError

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


def test_a_file_of_other_bytes_is_refused_and_left(tmp_path: Path) -> None:
    (path := tmp_path / "picture").write_bytes(b"\x89PNG\n\xff\xfe")
    with pytest.raises(NumericsError, match="picture, line 1: this is no reading"):
        Readings().write(path)
    assert path.read_bytes() == b"\x89PNG\n\xff\xfe"


@pytest.mark.parametrize("write", [FOUND.write, Readings().write, Readings().page])
def test_what_is_no_path_is_refused(write: Callable[[Any], None]) -> None:
    with pytest.raises(LpqError, match="path must be str or Path, got NoneType"):
        write(None)
