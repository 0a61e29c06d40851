"""Finding the checkpoint to load: one that is whole, the same on all ranks.

Every rank digests a share of the files, and all hear of every fault before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, NoCheckpoint
from lpq.checkpoint.ranks import CheckpointRanks
from lpq.files.disk import PARTIAL
from lpq.files.manifest import MANIFEST, PICKLE, UNFINISHED, Manifest, read_manifest
from lpq.registry.showing import listed
from lpq.registry.warning import warn

REPLACED = ".replaced"
"""The ending of a checkpoint's name while another one takes its place."""
STEP = re.compile(rf"step-(\d+)({re.escape(REPLACED)}|{re.escape(PARTIAL)})?")


def step_name(step: int) -> str:
    """The name of the checkpoint after this step."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint that is whole."""

    path: Path
    sizes: dict[str, int]
    """The sizes of its files, which its manifest lists."""
    refused: tuple[str, ...]
    """The checkpoints that were refused before it, in words."""
    why: str
    """Why this checkpoint is taken though others are of later steps, in words; empty if no other is of a later step."""


def find(path: Path, ranks: CheckpointRanks, *, thorough: bool = True) -> WholeCheckpoint:
    """Find the checkpoint at ``path``, or, of the run there, the last one written that is whole.

    Not ``thorough``: the sizes of all files are compared, and the digests of the small ones only.
    """
    candidates = ranks.first(lambda: _candidates(path))
    refused: list[str] = []
    unfinished = 0
    for number, candidate in enumerate(candidates):
        manifest = ranks.first(lambda: read_manifest(candidate))  # noqa: B023
        reason = manifest if isinstance(manifest, str) else _why_not(candidate, manifest, ranks, thorough)
        if isinstance(manifest, Manifest) and reason is None:
            why = _why(candidate, candidates[number + 1 :])
            for line in refused:
                warn(f"{line}; {candidate.name} is loaded in its place", CheckpointWarning)
            if why:
                warn(why, CheckpointWarning)
            return WholeCheckpoint(candidate, manifest.sizes, tuple(refused), why)
        refused.append(f"checkpoint {candidate} is refused: {reason}")
        unfinished += reason == UNFINISHED
    others = ranks.first(lambda: _others(path))
    instead = f"Beside it there is {others}: load {path.parent}, of which the newest whole one is taken"
    if not refused:
        where = "" if others else ranks.first(lambda: _instead(path))
        raise NoCheckpoint(f"there is no checkpoint in {path}{where}" + (f". {instead}" if others else ""))
    error = NoCheckpoint if unfinished == len(refused) else CheckpointError
    raise error("\n".join([*refused, instead if others else "No whole checkpoint is left there"]))


def steps_in(directory: Path) -> list[tuple[int, str, Path]]:
    """The checkpoints of a run, from the last step on: step, what their names end in, and path."""
    matches = [(STEP.fullmatch(p.name), p) for p in directory.iterdir() if p.is_dir()]
    entries = [(int(match[1]), match[2] or "", path) for match, path in matches if match is not None]
    return sorted(entries, key=lambda entry: (-entry[0], ("", REPLACED, PARTIAL).index(entry[1])))


def manifests_in(directory: Path) -> dict[Path, Manifest]:
    """The manifests of a run's checkpoints, as far as they can be read."""
    manifests = {path: read_manifest(path) for _, _, path in steps_in(directory)}
    return {path: manifest for path, manifest in manifests.items() if isinstance(manifest, Manifest)}


def _newest_first(directory: Path) -> list[Path]:
    """List the checkpoints of a run, the last one written first: in the order of steps, unless the run went back.

    One without a time of writing comes before all of the same step or an earlier one.
    """
    entries, manifests = steps_in(directory), manifests_in(directory)
    times = [(step, manifests[path].time) for step, _, path in entries if path in manifests]

    def time_of(step: int, path: Path) -> int:
        if path in manifests:
            return manifests[path].time
        return max((when for other, when in times if other <= step), default=0)

    return [path for step, _, path in sorted(entries, key=lambda entry: (-time_of(entry[0], entry[2]), -entry[0]))]


def _why(choice: Path, older: Sequence[Path]) -> str:
    """The reason why a checkpoint is taken though others, which were written earlier, are of later steps."""
    match = STEP.fullmatch(choice.name)
    steps = [(STEP.fullmatch(path.name), path.name) for path in older]
    later = [name for other, name in steps if match and other and not other[2] and int(other[1]) > int(match[1])]
    if not later:
        return ""
    return (
        f"checkpoint {choice} is loaded, which was written last: {listed(later)} beside it "
        f"{'is of a later step and was' if len(later) == 1 else 'are of later steps and were'} written before it, so "
        "the run went back. To load another one give its own path"
    )


def _candidates(path: Path) -> list[Path]:
    """The checkpoints that may be meant: the path itself, or the checkpoints of the run in that directory."""
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and a checkpoint is a directory: give that, or load a file of one model with "
            "lpq.checkpoint.import_file"
        )
    if path.is_dir() and not any((path / name).exists() for name in (MANIFEST, PICKLE)):
        return _newest_first(path)
    beside = [path, path.with_name(path.name + REPLACED), path.with_name(path.name + PARTIAL)]
    return [p for p in beside if p.exists()][:1]


def _instead(path: Path) -> str:
    """The end of the message that there is no checkpoint, which names what there is in its place."""
    if not path.exists():
        return ": there is no such folder"
    if not (path / "config.json").is_file():
        return ""
    return (
        ", but files of a model, config.json among them: load it with the library that wrote them, convert it, and "
        "pass the model, as in lpq.export(model, …)"
    )


def _others(path: Path) -> str:
    """The finished checkpoints of the run to which this checkpoint belongs, newest first."""
    if not STEP.fullmatch(path.name) or not path.parent.is_dir():
        return ""
    return listed([other.name for _, ending, other in steps_in(path.parent) if not ending and other.name != path.name])


def _why_not(path: Path, manifest: Manifest, ranks: CheckpointRanks, thorough: bool) -> str | None:
    """Why a checkpoint must not be loaded, or None if it is whole."""
    share = sorted(manifest.files)[ranks.rank :: ranks.size]
    faults = ranks.all(lambda: [f for name in share if (f := manifest.fault(path, name, thorough=thorough))])
    return "; ".join(fault for on_rank in faults for fault in on_rank) or None
