"""Compiled kernels are run from a file only if nobody but this user and root can have written it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lpq.kernels import code_cache, nvrtc_cache, trusted
from lpq.kernels.code_cache import KernelCacheWarning

ANOTHER = 4711
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def cubin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], bytes]:
    """Compiles a source, or takes what was kept of it in ``cache/lpq``."""
    count = 0

    def compile_source(*_: object) -> bytes:
        nonlocal count
        count += 1
        return f"code {count}".encode()

    (tmp_path / "f.cu").write_text("")
    monkeypatch.setattr(nvrtc_cache, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc_cache, "compiler_version", lambda: "13.0")
    monkeypatch.setenv("LPQ_CACHE_DIR", str(tmp_path / "cache" / "lpq"))
    return lambda: nvrtc_cache.cubin(tmp_path / "f.cu", (), "sm_90a")


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def anybody(path: Path) -> None:
    path.chmod(mode(path) | 0o022)


def group(path: Path) -> None:
    os.chown(path, -1, ANOTHER)
    path.chmod(mode(path) | 0o020)


def another(path: Path) -> None:
    os.chown(path, ANOTHER, -1)


HOWS = pytest.mark.parametrize(
    "how", [anybody, pytest.param(group, marks=as_root), pytest.param(another, marks=as_root)]
)


@HOWS
def test_a_file_that_others_can_have_written_is_compiled_anew(
    how: Callable[[Path], None], cubin: Callable[[], bytes], tmp_path: Path
) -> None:
    assert cubin() == b"code 1"
    (file,) = (tmp_path / "cache" / "lpq").iterdir()
    how(file)
    words = r"a file in .*lpq (belongs to another user \(4711\)|can be written by)"
    with pytest.warns(KernelCacheWarning, match=words):
        assert cubin() == b"code 2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubin() == b"code 2", "it was replaced by one of this user's"


@HOWS
@pytest.mark.parametrize("above", [False, True])
def test_a_folder_that_others_can_write_is_left_alone(
    how: Callable[[Path], None], above: bool, cubin: Callable[[], bytes], tmp_path: Path
) -> None:
    assert cubin() == b"code 1"
    folder = tmp_path / "cache" if above else tmp_path / "cache" / "lpq"
    how(folder)
    before = [p.read_bytes() for p in (tmp_path / "cache" / "lpq").iterdir()]
    with pytest.warns(KernelCacheWarning, match=rf"cannot be kept in .*\({folder} (belongs|can be).* LPQ_CACHE_DIR to"):
        assert cubin() == b"code 2"
    assert [p.read_bytes() for p in (tmp_path / "cache" / "lpq").iterdir()] == before
    assert str(folder) in str(code_cache.why_unkept())


def test_a_sticky_folder_is_no_place_for_files_and_one_for_folders(cubin: Callable[[], bytes], tmp_path: Path) -> None:
    assert cubin() == b"code 1"
    (tmp_path / "cache").chmod(0o1777)
    assert cubin() == b"code 1"
    (tmp_path / "cache" / "lpq").chmod(0o1777)
    with pytest.warns(KernelCacheWarning, match="can be written by others"):
        assert cubin() == b"code 2"


def test_links_are_resolved(cubin: Callable[[], bytes], tmp_path: Path) -> None:
    """A link to a folder, and to a file: its target is judged."""
    assert cubin() == b"code 1"
    (tmp_path / "open").mkdir()
    moved = (tmp_path / "cache" / "lpq").rename(tmp_path / "open" / "lpq")
    (tmp_path / "cache" / "lpq").symlink_to(moved)
    assert cubin() == b"code 1"
    anybody(tmp_path / "open")
    with pytest.warns(KernelCacheWarning, match=rf"{tmp_path}/open can be written"):
        assert cubin() == b"code 2"
    (tmp_path / "cache" / "lpq").unlink()
    (tmp_path / "cache" / "lpq").mkdir()
    (file,) = moved.iterdir()
    (tmp_path / "cache" / "lpq" / file.name).symlink_to(file)
    with pytest.warns(KernelCacheWarning, match=rf"compiled anew: {tmp_path}/open can be written"):
        assert cubin() == b"code 3"
    assert cubin() == b"code 3"
    assert not (tmp_path / "cache" / "lpq" / file.name).is_symlink()


def test_what_is_no_file_holds_nobody_up(cubin: Callable[[], bytes], tmp_path: Path) -> None:
    assert cubin() == b"code 1"
    (file,) = (tmp_path / "cache" / "lpq").iterdir()
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.warns(KernelCacheWarning, match="should be a file, and is none"):
        assert cubin() == b"code 2"


def test_folders_are_for_this_user_alone_and_files_as_the_umask_says(
    umask: int, cubin: Callable[[], bytes], tmp_path: Path
) -> None:
    cubin()
    (file,) = (tmp_path / "cache" / "lpq").iterdir()
    assert mode(tmp_path / "cache") == mode(tmp_path / "cache" / "lpq") == 0o700
    assert mode(file) == 0o644 & ~umask


def test_a_folder_that_is_shared_stays_as_it_is(cubin: Callable[[], bytes], tmp_path: Path) -> None:
    (tmp_path / "cache" / "lpq").mkdir(parents=True)
    (tmp_path / "cache" / "lpq").chmod(0o755)
    assert cubin() == b"code 1"
    assert cubin() == b"code 1"
    assert mode(tmp_path / "cache" / "lpq") == 0o755


def test_a_group_of_ones_own_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems make one for each user, and folders that it may write."""
    tmp_path.chmod(0o770)
    os.chown(tmp_path, -1, os.getegid())
    monkeypatch.setattr(trusted, "_is_own_group", lambda group, user: (group, user) == (os.getegid(), os.geteuid()))
    assert trusted.fault(tmp_path) is None
    monkeypatch.setattr(trusted, "_is_own_group", lambda group, user: False)
    assert trusted.fault(tmp_path) == f"{tmp_path} can be written by others"
