"""What tests compile is kept between runs, under names of all that it is made of, in a folder that checkouts share.

``$XDG_CACHE_HOME/lpq-tests``, by default ``~/.cache/lpq-tests``, may be removed at any time. Where there can be none
that only this user writes to, each process has its own. Of processes that ask for the same file at once, one compiles.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from lpq.kernels import code_cache, trusted

SOURCES = (".cu", ".cuh", ".h", ".cpp")
DAYS = 30
"""For how long a file is kept that no run asks for."""


@functools.cache
def folder() -> Path:
    """Found, and swept, once in a process."""
    try:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lpq-tests"
        trusted.make(place)
        usable = trusted.fault(place) is None and os.access(place, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # as where this user has no home
        usable = False
    if not usable:
        place = Path(tempfile.mkdtemp(prefix="lpq-tests-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    sweep(place, time.time() - DAYS * 24 * 3600)
    return place


def sweep(place: Path, before: float) -> None:
    """Remove the files that were last asked for before then. Locks stay: another process may wait for one."""
    for path in place.glob("**/*"):
        with suppress(OSError):  # another process sweeps, too
            if path.is_file() and path.suffix != ".lock" and path.stat().st_mtime < before:
                path.unlink()


def compiled(made_of: object, compile: Callable[[], bytes]) -> tuple[bytes, Path]:
    """Return what ``compile`` returns, or once did for the same ``made_of``, and its file, which ends with a digest."""
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]
    place = folder() / name
    with FileLock(folder() / f"{name[0]}.lock"):
        code = code_cache._read(place)
        if code is None:
            code = compile()
            if not code_cache._write(place, code):
                raise OSError(f"{place} cannot be written")
        else:
            os.utime(place)
    return code, place


def digest(paths: Iterable[Path]) -> str:
    """Of the contents of files, in this order."""
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


def tree(folder: Path) -> str:
    """A digest of the sources and headers of C++ and CUDA in a folder, and of where they lie in it."""
    paths = sorted(path for path in folder.glob("**/*") if path.suffix in SOURCES)
    return digest(paths) + repr([str(path.relative_to(folder)) for path in paths])


@functools.cache
def version(compiler: str) -> str:
    """Which compiler this is, in its own words, and where it is."""
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return f"{shutil.which(compiler)} {told}"
