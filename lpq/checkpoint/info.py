"""Info: the content of a checkpoint beside its tensors."""

from __future__ import annotations

import io
import pickle
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lpq.checkpoint import pickles
from lpq.checkpoint.background import ranks_of
from lpq.checkpoint.description import Description
from lpq.checkpoint.errors import CheckpointError, expect
from lpq.checkpoint.finding import WholeCheckpoint, find
from lpq.checkpoint.optimizer import check_data
from lpq.files.disk import json_of, place
from lpq.files.manifest import DESCRIPTION, EXTRA, INDEX, MANIFEST
from lpq.nn.first_argument import check_flags
from lpq.recipes import Policy, Steps
from lpq.registry.showing import Readable, number
from lpq.torch_private.pytree import keystr, tree_flatten_with_path

OWNERS = {"extra": "extra", "model": "what get_extra_state of a module returned", "optimizer": "the optimizer"}
"""The owner, in words, of each value that is kept beside the tensors."""
UNREADABLE = (pickle.PickleError, AttributeError, TypeError)
"""The errors that pickling raises for a value that it cannot write or must not read."""


@dataclass(frozen=True)
class Info(Readable):
    """The values that were saved beside the tensors."""

    path: Path
    step: int | None
    extra: Any
    """The value that was given as ``extra`` on rank 0."""
    description: Description
    refused: tuple[str, ...] = ()
    """The newer checkpoints that are not whole, in words."""
    why: str = ""
    """Why this checkpoint is taken though others beside it are of later steps, in words: it was written last."""

    def __str__(self) -> str:
        """A few lines for people; ``repr`` has everything."""
        description = self.description
        stored = Counter(entry["quantizer"] for entry in description.quantized.values())
        recipes = Counter(recipe or "no recipe" for recipe in description.recipes.values())
        lines = [
            f"{self.path}" + (f", after step {self.step}" if self.step is not None else ""),
            *(f"{number(count, 'layer')} with {recipe}" for recipe, count in recipes.items()),
            *(f"{count} tensors stored as {quantizer}" for quantizer, count in stored.items()),
            *(f"{name} from {entry['distribution']} {entry['version']}" for name, entry in description.formats.items()),
            *([f"extra: {' '.join(reprlib.repr(self.extra).split())}"] if self.extra is not None else []),
            *self.refused,
            *([self.why] if self.why else []),
        ]
        return "\n  ".join(lines)

    @property
    def policies(self) -> dict[str, Policy]:
        """The policy of each module that ``lpq.convert`` got, by name; mostly there is one, and its name is empty."""
        return {name: policy for name, (policy, _) in self.description.policies().items()}

    @property
    def policy(self) -> Policy | None:
        """The policy of the model; None if it was not converted."""
        return next(iter(self.policies.values()), None)

    @property
    def steps(self) -> Steps:
        """The length of the run that ``lpq.convert`` was given."""
        conversion: Mapping[str, Any] = next(iter(self.description.conversions.values()), {})
        return conversion.get("steps")


def info(path: str | Path, *, process_group: dist.ProcessGroup | None = None, thorough: bool = False) -> Info:
    """Describe a checkpoint.

    Args:
        path: A checkpoint, or the directory of a run, of which the last one written that is whole is described.
        process_group: The ranks that read together; None: each reads for itself.
        thorough: Compare the digests of all files, as ``load`` does, and not only the sizes of those with tensors: so
            both take the same checkpoint of a run.
    """
    ranks = ranks_of(process_group, False, "reads")
    ranks.each(lambda: check_flags("info", CheckpointError, thorough=thorough))
    checkpoint = find(ranks.each(lambda: place(path)), ranks, thorough=thorough)
    return ranks.each(lambda: read(checkpoint)[0])


def read(checkpoint: WholeCheckpoint) -> tuple[Info, dict[str, Any]]:
    """Read the info of a whole checkpoint, and the values that ``save`` kept beside the tensors for ``load``."""
    path = checkpoint.path
    try:
        description = Description.read(json_of((path / DESCRIPTION).read_text(encoding="utf-8")))
        expect(description.version == 1 or INDEX in checkpoint.sizes, f"its {MANIFEST} does not list {INDEX}")
    except (CheckpointError, OSError, ValueError, RecursionError) as error:
        known = isinstance(error, CheckpointError | OSError)
        why = f"its {DESCRIPTION} is not the JSON that lpq.checkpoint.save writes ({error}): do not trust it"
        raise CheckpointError(f"checkpoint {path} cannot be read: {error if known else why}") from error
    try:
        beside: dict[str, Any] = pickles.load(path / EXTRA)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: its {EXTRA}: {error}") from error
    if not isinstance(beside, dict) or not beside.keys() >= OWNERS.keys() or not isinstance(beside["model"], dict):
        raise CheckpointError(f"checkpoint {path} cannot be read: its {EXTRA} is not what lpq.checkpoint.save writes")
    check_data(beside["optimizer"])
    return Info(path, description.step, beside["extra"], description, checkpoint.refused, checkpoint.why), beside


def pickled(beside: dict[str, Any]) -> bytes:
    """Pickle the values beside the tensors; refuse those that cannot be read again without running code."""
    try:
        return _pickled(beside)
    except UNREADABLE:
        raise CheckpointError(
            f"{_unreadable(beside)}, which torch.load(…, weights_only=True) would not read: save numbers, strings, "
            "tensors, and lists and dicts of them"
        ) from None  # a traceback would show torch's advice to load unsafely


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return buffer.getvalue()


def _unreadable(beside: dict[str, Any]) -> str:
    """Name the value that cannot be read again, and its owner."""
    for whose, value in beside.items():
        for path, leaf in tree_flatten_with_path(value)[0]:
            try:
                _pickled(leaf)
            except UNREADABLE:
                return f"{OWNERS[whose]} holds a {type(leaf).__name__}" + (f" at {keystr(path)}" if path else "")
    return f"{' or '.join(OWNERS[whose] for whose in beside)} holds a container of a kind of its own"
