"""Info: what a checkpoint holds beside its tensors."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lpq.checkpoint.description import Description
from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.finding import DESCRIPTION, EXTRA, find
from lpq.checkpoint.ranks import Ranks
from lpq.recipes import Policy


@dataclass(frozen=True)
class Info:
    """What was saved beside the tensors."""

    path: Path
    step: int | None
    extra: Any
    """What was given as ``extra`` on rank 0."""
    description: Description
    refused: tuple[str, ...] = ()
    """The newer checkpoints that are not whole, in words."""

    @property
    def policies(self) -> dict[str, Policy]:
        """The policy of each module that ``lpq.convert`` got, by name; mostly there is one, and its name is empty."""
        return {name: policy for name, (policy, _) in self.description.policies().items()}

    @property
    def policy(self) -> Policy | None:
        """The policy of the model; None if it was not converted."""
        return next(iter(self.policies.values()), None)

    @property
    def steps(self) -> int | None:
        """The length of the run that ``lpq.convert`` was told."""
        conversion: Mapping[str, Any] = next(iter(self.description.conversions.values()), {})
        return conversion.get("steps")


def info(path: str | Path) -> Info:
    """What is saved in the checkpoint at ``path``, or in the newest whole one of the run there.

    All ranks call it. The tensors are not read; ``load`` checks their digests, this only the sizes of their files.
    """
    ranks = Ranks()
    found, refused = find(Path(path), ranks, thorough=False)
    return ranks.all(lambda: read(found, refused)[0])[ranks.rank]


def read(path: Path, refused: tuple[str, ...]) -> tuple[Info, dict[str, Any]]:
    """What a whole checkpoint says of itself, and what ``save`` kept beside the tensors for ``load``."""
    try:
        description = Description.read(json.loads((path / DESCRIPTION).read_text(encoding="utf-8")))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    beside: dict[str, Any] = torch.load(path / EXTRA, map_location="cpu", weights_only=True)
    return Info(path, description.step, beside["extra"], description, refused), beside


def pickled(beside: dict[str, Any]) -> bytes:
    """What is kept beside the tensors; only what can be read again without running code."""
    buffer = io.BytesIO()
    torch.save(beside, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "extra, the state of a module (get_extra_state) or an optimizer's options hold something that "
            f"torch.load(…, weights_only=True) would not read: {str(error).strip().splitlines()[0]} Save numbers, "
            "strings, tensors, and lists and dicts of them"
        ) from error
    return buffer.getvalue()
