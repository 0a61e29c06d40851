"""Files and directories that are whole or do not count: written beside their place, flushed to the disk, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from lpq.files.errors import CheckpointError
from lpq.registry.showing import brief

PARTIAL = ".partial"
"""The ending of the name of an unfinished file or directory."""
PLAIN = re.compile(r"[\w.-]*\w[\w.-]*", re.ASCII)
"""The names of a checkpoint's files: they lead nowhere else."""


def place(path: object, argument: str = "path") -> Path:
    """The place of a file or a directory that a user gave under this name."""
    if not isinstance(path, str | os.PathLike):
        model = ": the model is the first argument" if hasattr(path, "state_dict") else ""
        raise CheckpointError(f"{argument} must be str or Path, got {type(path).__name__}{model}")
    if not os.fspath(path):
        raise CheckpointError(f"{argument} is empty: give a place on the disk, as '.' for the current directory")
    return Path(path) if Path(path).name not in ("", "..") else resolved(Path(path))  # names of others are made of its


def resolved(path: Path) -> Path:
    """The place where something is written that is to be at ``path``: where that leads, if it is a link."""
    target = Path(os.path.realpath(path))
    if not target.name:
        raise CheckpointError(f"{target} is the root of a file system: give a directory in it")
    return target


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(folder: Path, name: str, size: int, sha256: str | None) -> str | None:
    """Why a file differs from its entry in the manifest, or None. Without a digest its size alone is compared."""
    if not PLAIN.fullmatch(name):
        return f"{name[:200]!r} is not the name of a file in it"
    try:
        reason = astray(folder, name) or _fault(folder / name, size, sha256)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return f"{name}: {reason}" if reason is not None else None


def astray(folder: Path, name: str) -> str | None:
    """Why a name in this folder does not belong to an ordinary file in it, or None."""
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        return "it is a link to a file outside of the checkpoint"
    return None if stat.S_ISREG(path.stat().st_mode) else "it is no ordinary file"


def _fault(path: Path, size: int, sha256: str | None) -> str | None:
    if (actual := path.stat().st_size) != size:
        return f"it has {actual} bytes where its manifest says {size}, so it is truncated or was changed"
    if sha256 is not None and digest(path) != sha256:
        return "its SHA-256 differs from its manifest, so it is damaged or was changed"
    return None


def json_of(text: str | bytes) -> Any:
    """The content of a JSON file, in which no name stands twice in a table: readers differ in which entry they take."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(table := dict(pairs)) < len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"it has a name twice: {brief(twice)}")
        return table

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    path.write_bytes(data)
    flush(path)


def publish(temporary: Path, path: Path) -> None:
    """Give a file or a directory its name once it is on the disk, and wait until the name is, too."""
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
