"""The errors of checkpoints, in words that name the file or the tensor and the remedy.

Each is made from its message alone, so that it travels from the rank that found it to all others.
"""

from __future__ import annotations

from lpq.registry.errors import LpqError, OptionError
from lpq.registry.showing import printable

TRUST = "do not trust it"
"""The advice about a file that was changed."""


class CheckpointError(LpqError):
    """A checkpoint that could not be saved or cannot be loaded."""


class UnknownName(CheckpointError, OptionError):
    """There is no layer, or no layout of an inference engine, of a name that was given."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint, or none was ever finished: a new run may start."""


class MissingPlugin(CheckpointError):
    """A checkpoint with a format whose plugin cannot be used here."""


class CheckpointWarning(UserWarning):
    """A checkpoint was refused and an older one serves, or not all of one has a place here."""


def shown(name: str) -> str:
    """The name that a tensor of a checkpoint has in its model or optimizer."""
    return printable(name.removeprefix("model."))


def expect(so: bool, otherwise: str) -> None:
    """Refuse a file that is as nobody honest writes it, unless it is ``so``."""
    if not so:
        raise CheckpointError(f"{otherwise}: {TRUST}")
