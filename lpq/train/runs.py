"""The directory of a run: where a new one goes, and how an interrupted one is found and continued.

``config.toml`` in it holds the settings, and can be given to ``--config``.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lpq.cli.runs import CONFIG, RECIPE
from lpq.train import gpu_size
from lpq.train.config import TrainConfig, read
from lpq.train.errors import TrainError

RUNS = Path("runs")
"""The directory of runs if none is given."""
CONVERSION = "conversion.txt"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
PLOT = "loss.png"
PAGE = "numerics.html"
"""The page that ``lpq report`` writes."""
SECOND = "-second-seed"
"""Behind the name of a baseline: its training with another seed."""
TRAININGS = (RECIPE, "bf16", "fp32", f"bf16{SECOND}", f"fp32{SECOND}")
"""The folders of the trainings that a run may consist of."""
OWN = (CONFIG, CONVERSION, SUMMARY, PLOT, PAGE, *TRAININGS)
"""The files that a run makes in its directory. A new run begins where there are none of them, so that it never touches
files of others."""

WHY_STEPS = " (the learning rate's schedule, and a policy's fractions, span the whole run, so its length is fixed)"


def resolve(command_line: Mapping[str, Any], file: Path | None = None) -> TrainConfig:
    """Return the configuration: the options of the command line, then of a file, then the device's defaults.

    With ``resume`` all other options come from the resumed run; an option that contradicts it is an error.
    """
    given = {**(read(file) if file else {}), **command_line}
    options: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if not options.get("resume"):
        return TrainConfig(**{**gpu_size.defaults(options), **options})
    directory = Path(options["out"]) if options.get("out") else newest()
    stored = stored_config(directory)
    refuse_other_settings(options, stored, directory)
    return TrainConfig(**{**stored.__dict__, **options, "out": str(directory)})


def newest(purpose: str = "to resume: start one without --resume, or name it with --out") -> Path:
    """The directory under ``runs/`` that was begun last; where there is none, an error says what it is wanted for."""
    configs = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda p: p.stat().st_mtime_ns)
    if not configs:
        raise TrainError(f"there is no run under {RUNS}/ {purpose}")
    return configs[-1].parent


def is_run(directory: Path) -> bool:
    """Whether there is a run in ``directory``."""
    return (directory / CONFIG).is_file()


def stored_config(directory: Path) -> TrainConfig:
    """The settings of the run in ``directory``."""
    if not is_run(directory):
        raise TrainError(f"there is no run in {directory} to resume (it has no {CONFIG}): start it without --resume")
    return TrainConfig(**read(directory / CONFIG))


def refuse_other_settings(options: Mapping[str, object], stored: TrainConfig, directory: Path) -> None:
    """Raise an error if ``options`` would continue the run in ``directory`` as another one."""
    for key, value in stored.settings().items():
        if key in options and options[key] != value:
            raise TrainError(
                f"the run in {directory} has {key} = {value!r} and cannot go on with {options[key]!r}"
                f"{WHY_STEPS if key == 'steps' else ''}: leave {key} out, or name another run with --out"
            )


def open_directory(config: TrainConfig) -> Path:
    """The directory of this run: the directory that it resumes, or a new one with its settings in it."""
    with opened(config) as directory:
        return directory


@contextmanager
def opened(config: TrainConfig) -> Iterator[Path]:
    """``open_directory``; a new run that fails before it has done a step leaves nothing behind.

    So the same command, corrected, can be given again.
    """
    if config.resume:
        directory = Path(config.out) if config.out else newest()
        refuse_other_settings(config.settings(), stored_config(directory), directory)
        yield directory
        return
    with ExitStack() as undo:
        directory = _new(config, undo)
        try:
            yield directory
        except BaseException:
            if begun(directory):
                undo.pop_all()
            raise
        undo.pop_all()


def begun(directory: Path) -> bool:
    """Whether the run in ``directory`` has done a step, or saved anything."""
    folders = [directory / name for name in TRAININGS]
    lines = any((folder / METRICS).is_file() and (folder / METRICS).stat().st_size for folder in folders)
    return lines or any(any(folder.glob("step-*")) for folder in folders)


def _new(config: TrainConfig, undo: ExitStack) -> Path:
    """The directory of a new run with its settings in it; ``undo`` removes the files that were made, and nothing
    else."""
    try:
        if config.out:
            directory, is_new = Path(config.out), True
            _check_free(directory)
            try:
                directory.mkdir(parents=True)
            except FileExistsError:
                is_new = False
        else:
            directory, is_new = _unused(config.title), True
        if is_new:
            undo.callback(_remove_if_empty, directory)
        with (directory / CONFIG).open("x", encoding="utf-8") as file:  # two runs started at once do not share it
            undo.callback(_forget, directory)
            file.write(config.to_toml())
    except OSError as error:
        where, why = config.out or f"{RUNS}/", error.strerror or error
        raise TrainError(f"no run can be kept in {where}: {why}; name another directory with --out") from error
    return directory


def _check_free(directory: Path) -> None:
    """Raise an error if anything is there that a run would write to."""
    for name in OWN:
        if os.path.lexists(directory / name):
            if name == CONFIG:
                raise TrainError(f"{directory} already holds a run: continue it with --resume, or name another --out")
            raise TrainError(
                f"{directory} already holds {name}, which a run would write to: move it away, or name another "
                "directory with --out"
            )


def _forget(directory: Path) -> None:
    """Remove the files that a run makes before its first step: there are no metrics yet."""
    for path in (directory / CONFIG, directory / CONVERSION, *(directory / name / METRICS for name in TRAININGS)):
        with suppress(OSError):  # it is not there
            path.unlink()
    for name in TRAININGS:
        _remove_if_empty(directory / name)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # something else is in it, or it is not there
        folder.rmdir()


def _unused(title: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9.]+", "-", title).strip("-.") or "run"
    RUNS.mkdir(exist_ok=True)
    for i in itertools.count(1):
        directory = RUNS / (name if i == 1 else f"{name}-{i}")
        try:
            directory.mkdir()  # whoever makes it has it: two runs started at once do not share one
        except FileExistsError:
            continue
        return directory
    raise AssertionError("the count never ends")
