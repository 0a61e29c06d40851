"""Keeping statistics in a file, so that a calibration that was interrupted goes on."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lpq.calibration.errors import CalibrationError
from lpq.calibration.reducing import Axes, everywhere, reduce
from lpq.calibration.statistics import Statistics
from lpq.checkpoint.claim import whole_file
from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.files import place

VERSION = 1


class Saved:
    """A file with the statistics of all ranks together. Where there is none yet, nothing was collected."""

    def __init__(self, path: str | Path | None, settings: Mapping[str, Any], axes: Axes) -> None:
        self._path, self._axes = place(path, "state") if path is not None else None, axes
        self._first = all(axis.rank == 0 for axis in axes.values())
        self._passes: dict[str, dict[str, Any]] = {}
        self._settings = dict(settings)
        if self._path is None:
            return
        found, error = None, None
        if self._first and self._path.exists():
            try:
                found = self._read(self._path)
            except CalibrationError as wrong:
                error = str(wrong)
        first = next(iter(everywhere((found, error), axes).values()))
        if first[1] is not None:
            raise CalibrationError(first[1])
        if first[0] is not None:
            self._passes = first[0]["passes"]

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            found = torch.load(path, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise CalibrationError(f"{path} cannot be read as the state of a calibration: {error}") from error
        if not isinstance(found, dict) or found.get("version") != VERSION or "passes" not in found:
            raise CalibrationError(f"{path} is not the state of a calibration of this version of lpq: move it away")
        for name, value in self._settings.items():
            if found["settings"].get(name) != value:
                raise CalibrationError(
                    f"{path} was kept with {name}={found['settings'].get(name)!r}, and this is {name}={value!r}: go on "
                    "with the same, or move the file away"
                )
        return found

    def restore(self, name: str, own: Statistics) -> int:
        """Take the kept statistics of a pass; return its number of batches. Only the first rank takes counts."""
        kept = self._passes.get(name)
        if kept is None:
            return 0
        state = kept["statistics"]
        mine = {key: (statistic.how, statistic.value.shape) for key, statistic in own.items()}
        theirs = {key: (how, value.shape) for how, values in state.items() for key, value in values.items()}
        if mine != theirs:
            other = sorted({key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)})
            raise CalibrationError(f"{self._path} was kept of another model: it differs in {other[0]}")
        if not self._first:
            state = {**state, "sum": {key: torch.zeros_like(value) for key, value in state["sum"].items()}}
        own.load(state, next(own.items())[1].value.device)
        return int(kept["batches"])

    def keep(self, name: str, own: Statistics, batches: int) -> None:
        """Write the statistics of all ranks, which call this together. The earlier file stays until it is replaced."""
        if self._path is None:
            return
        state = reduce(own, self._axes).state_dict()
        error = None
        self._passes[name] = {"statistics": state, "batches": batches}
        if self._first:
            made = {"version": VERSION, "settings": self._settings, "passes": self._passes}
            try:
                with whole_file(self._path) as path:
                    torch.save(made, path)
            except (CheckpointError, OSError, RuntimeError) as wrong:
                error = f"{self._path} cannot be written: {wrong}"
        first = next(iter(everywhere(error, self._axes).values()))
        if first is not None:
            raise CalibrationError(first)
