"""Keeping statistics in a file, so that a calibration that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lpq.calibration.errors import CalibrationError
from lpq.calibration.statistics import DTYPES, Statistics, Together, reduce
from lpq.checkpoint import pickles
from lpq.checkpoint.description import check_fields
from lpq.checkpoint.errors import CheckpointError
from lpq.files.claim import LOCK, whole_file
from lpq.files.disk import PARTIAL
from lpq.files.outputs import check_writable
from lpq.registry.errors import LpqError
from lpq.registry.showing import brief

VERSION = 1
CHANGED = "it was changed"


class SavedStatistics:
    """A file with the statistics of all ranks together. Where there is none yet, nothing was collected."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], ranks: Together) -> None:
        self._path, self._settings, self._ranks = path, dict(settings), ranks
        self._passes = ranks.first(lambda: self._read(path)) if path is not None else {}

    def _read(self, path: Path) -> dict[str, dict[str, Any]]:
        check_writable(f"{path}{PARTIAL}/{LOCK}", "choose another place for the state")
        if not path.exists():
            return {}
        try:
            data: dict[str, Any] = pickles.load(path)
            if isinstance(data, dict) and type(version := data.get("version")) is int and version != VERSION:
                raise CheckpointError(f"it is of version {version}, and this lpq reads version {VERSION}")
            _check(data)
        except LpqError as error:
            raise CalibrationError(
                f"{path} cannot be read as the state of a calibration: {error}. Move it away to begin anew"
            ) from error
        for name, value in self._settings.items():
            setting = data["settings"].get(name)
            if type(setting) is not type(value) or setting != value:
                raise CalibrationError(
                    f"{path} was kept with {name}={brief(setting)}, and this is {name}={value!r}: "
                    "go on with the same, or move the file away"
                )
        return cast("dict[str, dict[str, Any]]", data["passes"])

    def restore(self, name: str, own: Statistics) -> int:
        """Take the kept statistics of a pass; return its number of batches. Only the first rank takes counts."""
        entry = self._passes.get(name)
        if entry is None:
            return 0
        kept = {key: value for values in entry["statistics"].values() for key, value in values.items()}
        mine, theirs = ({key: (v.dtype, v.shape) for key, v in statistics.items()} for statistics in (own, kept))
        if mine != theirs:
            other = sorted({key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)})
            raise CalibrationError(f"{self._path} was kept of another model: it differs in {other[0]}")
        for key, value in kept.items():
            if value.dtype != DTYPES["sum"] or self._ranks.rank == 0:
                own.take(key, value.to(own[key].device))
        return cast("int", entry["batches"])

    def keep(self, name: str, own: Statistics, batches: int) -> None:
        """Write the statistics of all ranks, which call this together. The earlier file stays until it is replaced."""
        if (target := self._path) is None:
            return
        reduced = reduce(own, self._ranks).by_how()
        state = {how: {key: value.cpu() for key, value in values.items()} for how, values in reduced.items()}
        self._passes[name] = {"statistics": state, "batches": batches}
        self._ranks.first(lambda: self._write(target))

    def _write(self, target: Path) -> None:
        try:
            with whole_file(target) as file:
                torch.save({"version": VERSION, "settings": self._settings, "passes": self._passes}, file)
        except (CheckpointError, OSError, RuntimeError) as wrong:
            raise CalibrationError(f"{target} cannot be written: {wrong}") from wrong


def _check(data: Any) -> None:
    """Refuse data that is no state of a calibration, whatever the model."""
    check_fields("it", data, {"version": (int,), "settings": (dict,), "passes": (dict,)}, CHANGED)
    for name, entry in data["passes"].items():
        check_fields(f"its pass {brief(name)}", entry, {"statistics": (dict,), "batches": (int,)}, CHANGED)
        check_fields(f"its pass {brief(name)}", entry["statistics"], dict.fromkeys(DTYPES, (dict,)), CHANGED)
        values = [(how, key, value) for how in DTYPES for key, value in entry["statistics"][how].items()]
        for how, key, value in values:
            right = isinstance(key, str) and type(value) is Tensor and value.dtype == DTYPES[how]
            if not right or value.layout != torch.strided or value.device.type != "cpu" or (value < 0).any():
                raise CheckpointError(
                    f"its pass {brief(name)} has something else than a {how} as {brief(key)}: {CHANGED}"
                )
        if type(entry["batches"]) is not int or entry["batches"] < 0 or len(entry["statistics"]) != len(DTYPES):
            raise CheckpointError(f"its pass {brief(name)} is none: {CHANGED}")
