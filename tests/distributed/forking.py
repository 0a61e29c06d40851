"""Processes that are forked where a new one would take seconds to import torch, and what they wrote.

They find torch and most of lpq imported, and no plugins: what is imported when is no question for them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import processes

PATIENCE = 120
"""Seconds after which a process is killed."""


@dataclass(frozen=True)
class Ended:
    """How it ended."""

    status: int
    """The exit status; of several processes, that of the last."""
    out: str
    err: str
    statuses: tuple[int, ...] = ()
    """The exit status of each process, where they were forked."""


@dataclass(frozen=True)
class Place:
    """The caller's environment, folder and path, and the folder for what is written."""

    environment: dict[str, str]
    directory: str
    path: list[str]
    output: str

    def enter(self, **more: object) -> None:
        """Make this process one that was started there, with more variables in its environment."""
        os.environ.update(self.environment, OMP_NUM_THREADS="1", COLUMNS="200")
        os.environ.update({name: str(value) for name, value in more.items()})
        for name, stream in (("out", 1), ("err", 2)):
            os.dup2(os.open(Path(self.output) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(self.directory)
        sys.path[:] = self.path


def fork(count: int, function: Callable[..., None], *args: Any) -> Ended:
    """Fork so many processes of ``function(number, place, *args)``, which enters the place, and wait for their end."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(dict(os.environ), os.getcwd(), [*sys.path], folder)
        started = processes(function, count, place, *args, join=False)
        for process in started.processes:
            process.join(PATIENCE)
            process.kill()
            process.join()
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
        statuses = tuple(process.exitcode for process in started.processes)
        return Ended(statuses[-1], out, err, statuses)


def python(code: str) -> Ended:
    """``python -c CODE``."""
    return fork(1, _python, ["-c"], code)


def command(*arguments: str) -> Ended:
    """``lpq ARGUMENTS``."""
    return fork(1, _python, ["lpq", *arguments], "from lpq.__main__ import main; main()")


def _python(_: int, place: Place, arguments: list[str], code: str) -> None:
    place.enter()
    run(arguments, code)


def run(arguments: list[str], script: str) -> None:
    """Run the text of a script with these arguments, of which the first is its own name."""
    sys.argv = arguments
    exec(compile(script, arguments[0], "exec"), {"__name__": "__main__"})
