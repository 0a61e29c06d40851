"""Errors of calibration, in words that name the layer and the remedy."""

from __future__ import annotations

from lpq.registry.errors import LpqError


class CalibrationError(LpqError):
    """A model that cannot be calibrated so, or statistics that no scale follows from."""


class CalibrationWarning(UserWarning):
    """A layer got a static scale from something else than its own values."""
