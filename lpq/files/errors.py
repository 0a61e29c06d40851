"""The errors of files that are written or read, in words that name the file and the remedy.

Each is made from its message alone, so that it travels from the rank that found it to all others.
"""

from __future__ import annotations

from lpq.registry.errors import LpqError


class FileError(LpqError, OSError):
    """A file that cannot be written or read; Python's own error is its ``__cause__``."""


class CheckpointError(LpqError):
    """A checkpoint that could not be saved or cannot be loaded."""


class CheckpointWarning(UserWarning):
    """A checkpoint was refused and an older one serves, or not all of one has a place here."""
