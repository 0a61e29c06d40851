"""The directory of a run: where a new one goes, and how an interrupted one is found and continued.

``config.toml`` in it holds the settings, and can be given to ``--config``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpq.train.config import TrainConfig, read
from lpq.train.errors import TrainError

RUNS = Path("runs")
"""Where runs go that are not told where to go."""
CONFIG = "config.toml"


def resolve(command_line: Mapping[str, Any], file: Path | None = None) -> TrainConfig:
    """The configuration that the options of the command line, over those of a file, come to.

    With ``resume`` all other options are those of the resumed run, and one that contradicts it is an error.
    """
    given = {**(read(file) if file else {}), **command_line}
    if not given.get("resume"):
        return TrainConfig(**given)
    directory = Path(given["out"]) if given.get("out") else newest()
    stored = stored_config(directory)
    refuse_other_settings(given, stored, directory)
    return TrainConfig(**{**stored.__dict__, **given, "out": str(directory)})


def newest() -> Path:
    """The directory under ``runs/`` that was begun last."""
    found = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda p: p.stat().st_mtime_ns)
    if not found:
        raise TrainError(f"there is no run under {RUNS}/ to resume: start one without --resume, or name it with --out")
    return found[-1].parent


def stored_config(directory: Path) -> TrainConfig:
    """The settings of the run in ``directory``."""
    if not (directory / CONFIG).is_file():
        raise TrainError(f"there is no run in {directory} to resume (it has no {CONFIG}): start it without --resume")
    return TrainConfig(**read(directory / CONFIG))


def refuse_other_settings(given: Mapping[str, object], stored: TrainConfig, directory: Path) -> None:
    """An error if ``given`` would continue the run in ``directory`` as another one."""
    for key, value in stored.settings().items():
        if key in given and given[key] != value:
            raise TrainError(
                f"the run in {directory} has {key} = {value!r} and cannot go on with {given[key]!r}: "
                f"leave {key} out, or name another run with --out"
            )


def open_directory(config: TrainConfig) -> Path:
    """The directory of this run: the one that it resumes, or a new one with its settings in it."""
    if config.resume:
        directory = Path(config.out) if config.out else newest()
        refuse_other_settings(config.settings(), stored_config(directory), directory)
        return directory
    directory = Path(config.out) if config.out else _unused(config.title)
    if (directory / CONFIG).exists():
        raise TrainError(f"{directory} already holds a run: continue it with --resume, or name another --out")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(config.to_toml(), encoding="utf-8")
    return directory


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
