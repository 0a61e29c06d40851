"""The errors of training, in words that name the cause and the remedy."""

from __future__ import annotations

from lpq.registry.errors import LpqError, OptionError

GOES_ON = "free space, or make the folder writable: then `lpq train --resume`, or the same `lpq compare`, goes on"
"""The remedy where a file of a run cannot be written."""


class TrainError(LpqError):
    """A training run that cannot start or cannot go on."""


class TrainOptionError(TrainError, OptionError):
    """An option of a run that does not exist, or a value that it cannot take."""


class Diverged(TrainError):
    """A training whose loss or gradient is no number any more."""


class Stopped(TrainError):
    """The run got a signal to stop. Its last step is saved, and the message describes how to go on."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
        """The exit status that shells expect of a process that a signal ended."""
