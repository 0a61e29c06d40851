"""Finding the checkpoint to load: one that is whole, the same on all ranks.

Every rank digests a share of the files, and all hear of every fault before anything is loaded.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, NoCheckpoint, listed
from lpq.checkpoint.files import PARTIAL
from lpq.checkpoint.index import INDEX
from lpq.checkpoint.manifest import MANIFEST, UNFINISHED, Manifest, read_manifest
from lpq.checkpoint.ranks import Ranks

REPLACED = ".replaced"
"""What the name of a checkpoint ends in while another one takes its place."""
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
        if isinstance(manifest, Manifest) and reason is None:
            for line in refused:
                warnings.warn(f"{line}; {candidate.name} is loaded in its place", CheckpointWarning, stacklevel=3)
            return Found(candidate, manifest.sizes, tuple(refused))
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
    """The checkpoints of a run, from the last step on: step, what their names end in, and path."""
    matched = [(STEP.fullmatch(p.name), p) for p in directory.iterdir() if p.is_dir()]
    found = [(int(match[1]), match[2] or "", path) for match, path in matched if match is not None]
    return sorted(found, key=lambda entry: (-entry[0], ("", REPLACED, PARTIAL).index(entry[1])))


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, and not one of a run or of anything else."""
    return (path / MANIFEST).exists() or (path / INDEX).exists()


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


def _why_not(path: Path, manifest: Manifest, ranks: Ranks, thorough: bool) -> str | None:
    """Why a checkpoint must not be loaded, or None if it is whole."""
    share = sorted(manifest.files)[ranks.rank :: ranks.size]
    faults = ranks.all(lambda: [f for name in share if (f := manifest.fault(path, name, thorough=thorough))])
    return "; ".join(fault for on_rank in faults for fault in on_rank) or None
