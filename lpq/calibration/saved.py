"""Keeping statistics in a file, so that a calibration that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lpq.calibration.errors import CalibrationError
from lpq.calibration.reducing import Axes, everywhere, reduce
from lpq.calibration.statistics import DTYPES, Statistics
from lpq.checkpoint import pickles
from lpq.checkpoint.claim import whole_file
from lpq.checkpoint.description import check_fields
from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.files import place
from lpq.registry.errors import LpqError
from lpq.registry.showing import brief

VERSION = 1
CHANGED = "it was changed"


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
            found: dict[str, Any] = pickles.load(path)
            if isinstance(found, dict) and type(version := found.get("version")) is int and version != VERSION:
                raise CheckpointError(f"it is of version {version}, and this lpq reads version {VERSION}")
            _check(found)
        except LpqError as error:
            raise CalibrationError(
                f"{path} cannot be read as the state of a calibration: {error}. Move it away to begin anew"
            ) from error
        for name, value in self._settings.items():
            kept = found["settings"].get(name)
            if type(kept) is not type(value) or kept != value:
                raise CalibrationError(
                    f"{path} was kept with {name}={brief(kept)}, and this is {name}={value!r}: "
                    "go on with the same, or move the file away"
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
        return cast("int", kept["batches"])

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


def _check(found: Any) -> None:
    """Refuse what is no state of a calibration, whatever the model."""
    check_fields("it", found, {"version": (int,), "settings": (dict,), "passes": (dict,)}, CHANGED)
    for name, kept in found["passes"].items():
        check_fields(f"its pass {brief(name)}", kept, {"statistics": (dict,), "batches": (int,)}, CHANGED)
        check_fields(f"its pass {brief(name)}", kept["statistics"], dict.fromkeys(DTYPES, (dict,)), CHANGED)
        values = [(how, key, value) for how in DTYPES for key, value in kept["statistics"][how].items()]
        for how, key, value in values:
            right = isinstance(key, str) and type(value) is Tensor and value.dtype == DTYPES[how]
            if not right or value.layout != torch.strided or value.device.type != "cpu" or (value < 0).any():
                raise CheckpointError(
                    f"its pass {brief(name)} has something else than a {how} as {brief(key)}: {CHANGED}"
                )
        if type(kept["batches"]) is not int or kept["batches"] < 0 or len(kept["statistics"]) != len(DTYPES):
            raise CheckpointError(f"its pass {brief(name)} is none: {CHANGED}")
