"""Finding the checkpoint to load: one that is whole, the same on all ranks.

Every rank digests a share of the files, and all hear of every fault before anything is loaded.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpq.checkpoint import files
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, NoCheckpoint, listed
from lpq.checkpoint.files import PARTIAL
from lpq.checkpoint.index import INDEX
from lpq.checkpoint.ranks import Ranks

MANIFEST = "manifest.json"
DESCRIPTION = "lpq.json"
EXTRA = "extra.pt"
REPLACED = ".replaced"
"""What the name of a checkpoint ends in while another one takes its place."""
UNFINISHED = "it was never finished (a process ended while it was written)"
STEP = re.compile(rf"step-(\d+)({re.escape(REPLACED)}|{re.escape(PARTIAL)})?")


def step_name(step: int) -> str:
    """The name of the checkpoint after this step."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    path: Path
    sizes: dict[str, int]
    """Of its files, which its manifest lists."""
    refused: tuple[str, ...]
    """What was refused before it, in words."""


def find(path: Path, ranks: Ranks, *, thorough: bool = True) -> Found:
    """The checkpoint at ``path``, or the newest whole one below it.

    Not ``thorough``: the sizes of all files are compared, and the digests of the small ones only.
    """
    candidates = ranks.first(lambda: _candidates(path))
    refused: list[str] = []
    unfinished = 0
    for candidate in candidates:
        manifest = ranks.first(lambda: read_manifest(candidate))  # noqa: B023
        reason = manifest if isinstance(manifest, str) else _why_not(candidate, manifest, ranks, thorough)
        if isinstance(manifest, dict) and reason is None:
            for line in refused:
                warnings.warn(f"{line}; {candidate.name} is loaded in its place", CheckpointWarning, stacklevel=3)
            return Found(candidate, {name: said["bytes"] for name, said in manifest.items()}, tuple(refused))
        refused.append(f"checkpoint {candidate} is refused: {reason}")
        unfinished += reason == UNFINISHED
    others = ranks.first(lambda: _others(path))
    instead = f"Beside it there is {others}: load {path.parent}, of which the newest whole one is taken"
    if not refused:
        where = "" if others or ranks.first(path.exists) else ": there is no such folder"
        raise NoCheckpoint(f"there is no checkpoint in {path}{where}" + (f". {instead}" if others else ""))
    error = NoCheckpoint if unfinished == len(refused) else CheckpointError
    raise error("\n".join([*refused, instead if others else "No whole checkpoint is left there"]))


def steps_in(directory: Path) -> list[tuple[int, str, Path]]:
    """The checkpoints of a run, newest first: step, what their names end in, and path."""
    matched = [(STEP.fullmatch(p.name), p) for p in directory.iterdir() if p.is_dir()]
    found = [(int(match[1]), match[2] or "", path) for match, path in matched if match is not None]
    return sorted(found, key=lambda entry: (-entry[0], ("", REPLACED, PARTIAL).index(entry[1])))


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, and not one of a run or of anything else."""
    return (path / MANIFEST).exists() or (path / ".metadata").exists()


def _candidates(path: Path) -> list[Path]:
    """Where to look: the path itself, or the checkpoints of the run that is there."""
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and a checkpoint is a directory: give that, or load a file of one model with "
            "lpq.checkpoint.import_file"
        )
    if path.is_dir() and not is_checkpoint(path):
        return [found for _, _, found in steps_in(path)]
    beside = [path, path.with_name(path.name + REPLACED), path.with_name(path.name + PARTIAL)]
    return [p for p in beside if p.exists()][:1]


def _others(path: Path) -> str:
    """The finished checkpoints of the run that this one is of, newest first."""
    if not STEP.fullmatch(path.name) or not path.parent.is_dir():
        return ""
    return listed([found.name for _, ending, found in steps_in(path.parent) if not ending and found.name != path.name])


def read_manifest(path: Path) -> dict[str, Any] | str:
    """The files of a checkpoint with their sizes and digests, or why there is no list of them."""
    if path.name.endswith(PARTIAL):
        return UNFINISHED
    try:
        if (wrong := files.astray(path, MANIFEST)) is not None:
            return f"{MANIFEST}: {wrong}"
        said = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        if all(type(f["bytes"]) is int and isinstance(f["sha256"], str) for f in said.values()):
            lacking = [name for name in (INDEX, DESCRIPTION, EXTRA) if name not in said]
            found: dict[str, Any] = said
            return f"its {MANIFEST} does not list {listed(lacking)}" if lacking else found
    except FileNotFoundError:
        return f"it has no {MANIFEST}: lpq.checkpoint.save did not write it, or somebody removed that"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return f"its {MANIFEST} is damaged"


def _why_not(path: Path, manifest: dict[str, Any], ranks: Ranks, thorough: bool) -> str | None:
    """Why a checkpoint must not be loaded, or None if it is whole."""
    share = sorted(manifest)[ranks.rank :: ranks.size]
    faults = ranks.all(lambda: [found for name in share if (found := _fault(path, name, manifest[name], thorough))])
    every = [found for on_rank in faults for found in on_rank]
    return "; ".join(every) or None


def _fault(path: Path, name: str, said: dict[str, Any], thorough: bool) -> str | None:
    small = name in (DESCRIPTION, EXTRA)
    return files.fault(path, name, said["bytes"], said["sha256"] if thorough or small else None)
