"""What tests compile is kept, and compiled anew when anything that it is made of is another."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import kept


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept.folder.cache_clear()
    yield tmp_path / "lpq-tests"
    kept.folder.cache_clear()


class Compiler:
    def __init__(self) -> None:
        self.started = 0

    def __call__(self) -> bytes:
        self.started += 1
        return b"code %d" % self.started


def test_the_same_is_compiled_once(folder: Path) -> None:
    compile = Compiler()
    (first, place), (second, _), (other, _) = (kept.compiled(("a", text), compile) for text in ("x", "x", "y"))
    assert (first, second, other) == (b"code 1", b"code 1", b"code 2")
    assert place.parent == folder
    assert place.read_bytes().startswith(first)


def test_of_several_at_once_one_compiles(folder: Path) -> None:
    compile, all_here = Compiler(), threading.Barrier(4)

    def ask(_: int) -> bytes:
        all_here.wait(60)
        return kept.compiled("a", compile)[0]

    with ThreadPoolExecutor(4) as threads:
        assert {*threads.map(ask, range(4))} == {b"code 1"}
    assert compile.started == 1


def test_a_damaged_file_is_compiled_anew(folder: Path) -> None:
    compile = Compiler()
    _, place = kept.compiled("a", compile)
    place.write_bytes(place.read_bytes()[:-1])
    assert kept.compiled("a", compile) == (b"code 2", place)


def test_what_does_not_compile_is_not_kept(folder: Path) -> None:
    def wrong() -> bytes:
        raise KeyError("x")

    with pytest.raises(KeyError):
        kept.compiled("a", wrong)
    assert kept.compiled("a", Compiler())[0] == b"code 1"


def test_files_that_nobody_asks_for_go(folder: Path) -> None:
    (_, old), (_, asked), (_, new) = (kept.compiled(text, Compiler()) for text in "abc")
    for place in (old, asked):
        os.utime(place, (1e9, 1e9))
    kept.compiled("b", Compiler())
    kept.sweep(folder, new.stat().st_mtime - 3600)
    assert (old.exists(), asked.exists(), new.exists()) == (False, True, True)


def test_a_folder_that_others_write_to_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    code, place = kept.compiled("a", Compiler())
    assert (code, place.parent.exists(), place.parent == folder) == (b"code 1", True, False)


def test_sources_that_differ_in_content_or_name_have_another_digest(tmp_path: Path) -> None:
    header = tmp_path / "common" / "a.cuh"
    header.parent.mkdir()
    header.write_text("int a;")
    found = [kept.tree(tmp_path)]
    header.write_text("int b;")
    found.append(kept.tree(tmp_path))
    header.rename(header.with_name("b.cuh"))
    found.append(kept.tree(tmp_path))
    assert len({*found}) == 3
