"""The errors of checkpoints, beside the errors of files, in words that name the file or the tensor and the remedy."""

from __future__ import annotations

from lpq.files.errors import CheckpointError, CheckpointWarning
from lpq.registry.errors import OptionError
from lpq.registry.showing import printable

__all__ = [
    "TRUST", "CheckpointError", "CheckpointWarning", "MissingPlugin", "NoCheckpoint", "UnknownName", "expect",
    "tensor_name",
]  # fmt: skip

TRUST = "do not trust it"
"""The advice about a file that was changed."""


class UnknownName(CheckpointError, OptionError):
    """There is no layer, or no layout of an inference engine, of a name that was given."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint, or none was ever finished: a new run may start."""


class MissingPlugin(CheckpointError):
    """A checkpoint with a format whose plugin cannot be used here."""


def tensor_name(name: str) -> str:
    """The name that a tensor of a checkpoint has in its model or optimizer."""
    return printable(name.removeprefix("model."))


def expect(so: bool, otherwise: str) -> None:
    """Refuse a file that is as nobody honest writes it, unless it is ``so``."""
    if not so:
        raise CheckpointError(f"{otherwise}: {TRUST}")
