"""Checkpoints that are whole or do not exist.

A checkpoint is two files, ``step-00000100.pt`` and its manifest ``step-00000100.json`` (bytes, SHA-256). Both
are written beside their place, flushed to the disk and renamed; the manifest comes last and closes the
checkpoint. A file without a manifest, or one that no longer is what its manifest says, is never loaded: it is
refused in words, and the checkpoint before it serves. The newest two are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lpq.train.errors import CheckpointError

KEEP = 2
"""How many checkpoints stay: the newest, and one in case the newest is damaged."""


def save(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``state`` as the checkpoint after ``step`` steps; return its path."""
    path = directory / f"step-{step:08d}.pt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(path, step, state)
        _tidy(directory, path.stem)
    except (OSError, RuntimeError) as error:  # torch.save raises the latter where a disk is full
        raise CheckpointError(
            f"the checkpoint after step {step} could not be saved: {error}. The ones before it are as they "
            "were: free some space or make the directory writable, then go on with --resume"
        ) from error
    return path


def _write(path: Path, step: int, state: dict[str, Any]) -> None:
    manifest = path.with_suffix(".json")
    manifest.unlink(missing_ok=True)  # a manifest must never stand beside a file it was not written for
    temporary = path.with_suffix(".pt.partial")
    torch.save(state, temporary)
    said = {"step": step, "bytes": temporary.stat().st_size, "sha256": _digest(temporary)}
    _publish(temporary, path)
    temporary = manifest.with_suffix(".json.partial")
    temporary.write_text(json.dumps(said), encoding="utf-8")
    _publish(temporary, manifest)


def _tidy(directory: Path, newest: str) -> None:
    """Keep the last checkpoints up to ``newest`` alone: what is beyond it was refused on resuming."""
    keep = [_stem(p) for p in _files(directory, "json") if _stem(p) <= newest][:KEEP]
    for old in sorted(directory.glob("step-*")):  # a manifest comes, and goes, before its file
        if _stem(old) not in keep or old.suffix == ".partial":
            old.unlink()


def load(directory: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest whole checkpoint in ``directory``, or None where there never was one.

    ``say`` is told, in words, of every newer one that was refused. When all are refused, that is an error.
    """
    refused = []
    for path in _files(directory, "pt", "pt.partial"):
        reason = why_not(path)
        if reason is None:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return state
        refused.append(f"checkpoint {path} is refused: {reason}")
        say(refused[-1])
    if refused and not all(line.endswith(UNFINISHED) for line in refused):
        raise CheckpointError("\n".join([*refused, "No whole checkpoint is left; start a new run."]))
    return None


UNFINISHED = "it was never finished (the process ended while it was written)"


def why_not(path: Path) -> str | None:
    """Why the checkpoint at ``path`` must not be loaded, or None if it is whole."""
    manifest = path.with_suffix(".json")
    if path.suffix == ".partial" or not manifest.exists():
        return UNFINISHED
    try:
        said = json.loads(manifest.read_text())
        size, digest = said["bytes"], said["sha256"]
    except (ValueError, KeyError, TypeError):
        return f"its manifest {manifest.name} is damaged"
    if (found := path.stat().st_size) != size:
        return f"it has {found} bytes where its manifest says {size}, so it is truncated or was changed"
    if _digest(path) != digest:
        return "its SHA-256 is not that of its manifest, so it is damaged or was changed"
    return None


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _files(directory: Path, *endings: str) -> list[Path]:
    """The files of ``directory`` named ``step-….ENDING``, newest step first."""
    return sorted((p for p in directory.glob("step-*") if p.name.partition(".")[2] in endings), reverse=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(temporary: Path, path: Path) -> None:
    """Give a file its name once its bytes are on the disk, and wait until the name is, too."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
