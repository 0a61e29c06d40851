"""``manifest.json``: the files of a checkpoint with their sizes and digests. Every checkpoint has one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpq.files import disk
from lpq.files.claim import LOCK
from lpq.files.disk import PARTIAL
from lpq.files.errors import CheckpointWarning
from lpq.registry.showing import listed
from lpq.registry.warning import warn

MANIFEST = "manifest.json"
DESCRIPTION = "lpq.json"
EXTRA = "extra.pt"
INDEX, PICKLE = "index.json", ".metadata"
"""The two indexes of a checkpoint: lpq's, and the one of ``torch.distributed.checkpoint``."""
UNFINISHED = "it was never finished (a process ended while it was written)"


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    files: dict[str, dict[str, Any]]
    time: int
    """The time of writing in nanoseconds since 1970, which grows within a run; 0: not given."""

    def fault(self, path: Path, name: str, *, thorough: bool) -> str | None:
        """Why one of the files differs from its entry, or None. Not ``thorough``: large files are not digested."""
        data = self.files[name]
        digested = thorough or name in (DESCRIPTION, EXTRA)
        return disk.fault(path, name, data["bytes"], data["sha256"] if digested else None)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the files."""
        return {name: data["bytes"] for name, data in self.files.items()}


def read_manifest(path: Path) -> Manifest | str:
    """Read the manifest of a checkpoint; where none can be used, return the reason."""
    if path.name.endswith(PARTIAL):
        return UNFINISHED
    try:
        if (wrong := disk.astray(path, MANIFEST)) is not None:
            return f"{MANIFEST}: {wrong}"
        data = disk.json_of((path / MANIFEST).read_text(encoding="utf-8"))
        manifest = Manifest(data["files"], data.get("written", 0))
        if type(manifest.time) is int and all(
            type(f["bytes"]) is int and isinstance(f["sha256"], str) for f in manifest.files.values()
        ):
            absent = [name for name in (PICKLE, DESCRIPTION, EXTRA) if name not in manifest.files]
            return f"its {MANIFEST} does not list {listed(absent)}" if absent else manifest
    except FileNotFoundError:
        return f"it has no {MANIFEST}: lpq.checkpoint.save did not write it, or somebody removed that"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return f"its {MANIFEST} is damaged"


def is_whole(path: Path) -> bool:
    """Whether a checkpoint has all its files, in their sizes."""
    manifest = read_manifest(path)
    return isinstance(manifest, Manifest) and all(
        manifest.fault(path, n, thorough=False) is None for n in manifest.files
    )


def is_ours(path: Path) -> bool:
    """Whether a directory is a checkpoint of lpq, whole or not: one that has a manifest of lpq's."""
    return isinstance(read_manifest(path), Manifest)


def remove(path: Path, heir: Path | None = None) -> None:
    """Remove the files that the manifest of a checkpoint lists, if it has one, and the directory if no other is in it.

    The manifest goes last: if this ends half-way, the rest is a checkpoint that is not whole. Other files in it are not
    lpq's. They move to the directory ``heir``, which takes this one's place, or stay; a warning names them.
    """
    if not isinstance(manifest := read_manifest(path), Manifest):
        return
    try:
        for name in [*(name for name in manifest.files if disk.PLAIN.fullmatch(name)), LOCK]:
            if (path / name).is_symlink() or not (path / name).is_dir():
                (path / name).unlink(missing_ok=True)
        others = {entry.name: path for entry in path.iterdir() if entry.name != MANIFEST}
        for name in others:
            if heir is not None and not os.path.lexists(heir / name):
                (path / name).rename(heir / name)
                others[name] = heir
        (path / MANIFEST).unlink()
        if path not in others.values():
            path.rmdir()
    except OSError as error:
        warn(f"{path} is to be removed, and cannot be: {error.strerror or error}", CheckpointWarning)
        return
    if others:
        rest = listed([str(where / name) for name, where in sorted(others.items())])
        warn(f"{path} was removed but for files that lpq did not write: {rest}", CheckpointWarning)
