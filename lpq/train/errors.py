"""What goes wrong in training, in words that name the cause and the remedy."""

from __future__ import annotations

from lpq.registry.errors import LpqError


class TrainError(LpqError):
    """A training run that cannot start or cannot go on."""


class Stopped(TrainError):
    """The run was asked to stop. Its last step is saved, and the message says how to go on."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
        """What a shell expects of a process that a signal ended."""
