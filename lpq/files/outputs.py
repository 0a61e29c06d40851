"""The places that a user names for results: written in a folder that may be new, and tried before long work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from lpq.files.disk import place
from lpq.files.errors import FileError


@contextmanager
def writable(path: object, remedy: str = "choose another place") -> Iterator[Path]:
    """The place of a file to write, in a folder that is made if it is not there; what hinders that is told in words."""
    with _in_words(file := place(path), remedy):
        file.parent.mkdir(parents=True, exist_ok=True)
        yield file


def check_writable(path: object, remedy: str) -> None:
    """Refuse a place that cannot be written before the work whose result it gets. Nothing is made there."""
    with _in_words(file := place(path), remedy):
        there = next(one for one in (file, *file.absolute().parents) if one.exists())
        with there.open("ab") if there == file else TemporaryFile(dir=there):
            pass


@contextmanager
def _in_words(file: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except FileError:
        raise  # of another file, in words
    except OSError as error:
        raise FileError(f"{file} cannot be written: {error.strerror or error}; {remedy}") from error
