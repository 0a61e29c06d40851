"""Readings: statistics of a run's steps, shown as a table and a page, and written to files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

from lpq.files.disk import json_of
from lpq.files.errors import FileError
from lpq.files.outputs import writable
from lpq.files.typed import typed
from lpq.nn.first_argument import check_whole
from lpq.observe.sums import Reading, noise_order
from lpq.recipes import Recipe
from lpq.registry.errors import LpqError, OptionError
from lpq.registry.showing import Readable, brief


class NumericsError(LpqError, ValueError):
    """A model or an option that cannot be watched, a file of statistics that cannot be read, or a tool that is not
    there."""


NO_VALUES = (
    "is on the meta device, which has no values: give the model memory, model.to_empty(device=…), and its weights, and "
    "have batches on that device"
)
"""The end of an error about a tensor."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number of Python's or NumPy's, which may be NaN."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(owner: str, most: float, /, **given: object) -> None:
    """Refuse values that are no numbers from 0 to ``most``."""
    for name, value in given.items():
        if not is_number(value) or not 0 <= value <= most:
            to = "on" if math.isinf(most) else f"to {most:g}"
            raise NumericsError(f"{owner}: {name}={brief(value)}: it is a number from 0 {to}")


def check_forgets(owner: str, recipe: Recipe) -> None:
    """Refuse a recipe that remembers earlier steps, where no steps by it went before."""
    for operand, quantizer in recipe.operands.items():
        if quantizer.state:
            raise OptionError(
                f"{owner}: {recipe.title} remembers earlier steps for {operand}, and none were by it: name a recipe "
                "that measures each tensor"
            )


class Readings(Readable):
    """Statistics of a run. ``Readings.read`` takes them from a file."""

    def __init__(self, read: Iterable[Reading] = (), first: int = 0) -> None:
        """``first``: the number of the step from which on they are the run's own; earlier ones are in its file."""
        self._all = [*read]
        self._first = first
        self._written: dict[Path, tuple[int, int]] = {}
        """How many readings each file has, and its size then."""
        self._shown: dict[Path, int] = {}
        """How many readings each directory for TensorBoard has."""

    @classmethod
    def read(cls, path: str | Path) -> Readings:
        """Read what ``write`` wrote. Where a run was resumed and did a step again, the later reading counts. A last
        line without its end, as a process that was killed leaves it, does not count."""
        path = Path(path)
        try:
            if not path.is_file():
                raise NumericsError(f"there are no statistics in {path}: `lpq train --watch 100` writes numerics.jsonl")
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
        by_place: dict[Any, Reading] = {}
        for number, line in enumerate(lines, 1):
            try:
                reading = typed(Reading, json_of(line))
                if beyond := [name for name, value in reading.numbers().items() if not math.isfinite(value)]:
                    raise ValueError(f"{beyond[0]} is not finite")
            except ValueError as error:
                if line.startswith(b"{") and not line.endswith((b"}", b"\n")):
                    break  # cut off
                raise NumericsError(
                    f"{path}, line {number}: this is no reading of lpq.observe.numerics: {error}. Where the file was "
                    "changed, restore it or take the line out; else name another file"
                ) from error
            by_place[reading.step, reading.layer, reading.tensor, reading.direction, reading.recipe] = reading
        return Readings(by_place.values())

    def __str__(self) -> str:
        return self.table()

    def readings(self) -> Sequence[Reading]:
        """Return the statistics of all steps so far."""
        return self._all

    def worst(self) -> list[Reading]:
        """Return the readings of the last step, the noisiest first. Readings without an SNR, which have a NaN
        or no error, come first and last."""
        readings = self.readings()
        last = max((one.step for one in readings), default=0)
        return sorted((one for one in readings if one.step == last), key=noise_order)

    def table(self, most: int | None = 20) -> str:
        """Return a table of the last step, worst first, with at most ``most`` lines; None or 0: with all."""
        from lpq.observe.table import table

        if most is not None:
            check_whole("table", 0, NumericsError, most=most)
        return table(self.worst(), most or None)

    def write(self, path: str | Path) -> None:
        """Write a line of JSON for each reading, to each path all of them. The first call for a path writes the file
        anew, but for the lines of the steps before a resumed run; later ones add to it, or write it anew where somebody
        else has changed it. Another file than one of readings is refused."""
        with writable(path) as place:
            readings, path = self.readings(), place.absolute()
            count, size = self._written.get(path, (0, -1))
            if path.is_file() and path.stat().st_size == size:
                with path.open("a", encoding="utf-8") as file:
                    file.write(_lines(readings[count:]))
            elif path.exists() and not path.is_file():
                raise NumericsError(f"{path} is no file: write statistics to a file, as to numerics.jsonl in it")
            else:
                old = [r for r in Readings.read(path).readings() if r.step < self._first] if path.is_file() else []
                part = path.with_name(path.name + ".part")
                part.write_text(_lines([*old, *readings]), encoding="utf-8")
                os.replace(part, path)
            self._written[path] = len(readings), path.stat().st_size

    def page(self, path: str | Path) -> None:
        """Write one page of HTML with a chart of each layer over time. It asks for nothing from outside."""
        from lpq.observe.page import page

        with writable(path) as file:
            file.write_text(page(self.readings()), encoding="utf-8")

    def tensorboard(self, directory: str | Path) -> None:
        """Write the readings to a directory for TensorBoard, which must be installed: those that are new since the last
        call for this directory."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise NumericsError("TensorBoard is not installed: pip install tensorboard") from error
        readings = self.readings()
        with writable(directory) as place, SummaryWriter(str(directory := place.absolute())) as writer:
            for one in readings[self._shown.get(directory, 0) :]:
                for name, value in one.numbers().items():
                    writer.add_scalar(f"{name}/{one.title}", value, one.step)
        self._shown[directory] = len(readings)


def _lines(readings: Iterable[Reading]) -> str:
    return "".join(json.dumps(one.as_dict()) + "\n" for one in readings)
