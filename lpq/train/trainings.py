"""The results of trainings as files: a small JSON file for each, with its curves and what made them.

Nothing here imports torch: tables and figures are made of such files on any machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lpq.cli.runs import CURVES
from lpq.files.disk import json_of
from lpq.train.config import TrainConfig
from lpq.train.errors import TrainError

OF_ONE = frozenset({"recipe", "policy", "seed"})
"""The settings in which the trainings of a comparison differ."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training to its end: its curves, and what made them."""

    title: str
    """The recipe or the policy, as it was asked for."""
    seed: int
    policy: str
    """The policy as TOML; empty for the baseline."""
    settings: Mapping[str, Any]
    source: str
    """The origin of the text, in words."""
    text: str
    """The digest of the text."""
    losses: Sequence[float]
    """The training loss of each step, in nats per byte."""
    held_out: Sequence[tuple[int, float]]
    """Steps, and the loss on the held-out text after them; the last is the result."""
    diverged: str | None
    """Why it ended early, if it did."""
    step_seconds: float
    """The time of a step, its median."""
    machine: Mapping[str, Any]
    command: str
    """The command that asked for it, without what its numbers do not depend on."""
    date: str

    @property
    def baseline(self) -> bool:
        return not self.policy

    @property
    def result(self) -> float | None:
        """The held-out loss after the last step; None for a training that diverged."""
        return None if self.diverged is not None else self.held_out[-1][1]

    @property
    def tokens_per_second(self) -> float:
        return float(self.settings["batch"] * self.settings["seq"] / self.step_seconds)

    def write(self, folder: Path) -> None:
        """Write the file of the training, which is whole or not there."""
        path = file_of(folder, self.title, self.seed)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        os.replace(partial, path)


def file_of(folder: Path, title: str, seed: int) -> Path:
    """The file of a training."""
    return folder / f"{plain_name(title)}-seed{seed}.json"


def plain_name(title: str) -> str:
    """A title as the name of a file."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", title).strip("-.") or "recipe"


def read_all(folder: Path) -> list[Training]:
    """All trainings whose files lie in ``folder``, the baseline first."""
    every = [_read(path) for path in sorted(folder.glob(CURVES))]
    return sorted(every, key=lambda t: (not t.baseline, t.title, t.seed))


def _read(path: Path) -> Training:
    names = [f.name for f in fields(Training)]
    try:
        table = json_of(path.read_text(encoding="utf-8"))
        training = Training(**{name: table[name] for name in names})
        if training.diverged is None and not training.held_out:
            raise ValueError("it has no held-out loss")
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{path} is no curve of lpq compare ({error}): move it away") from error
    return training


def shared(config: TrainConfig) -> dict[str, object]:
    """The settings that all trainings of a comparison have in common."""
    return {key: value for key, value in config.settings().items() if key not in OF_ONE}


def refuse_others(trainings: Iterable[Training], config: TrainConfig, folder: Path) -> None:
    """Raise an error if a training in ``folder`` had other settings than ``config``."""
    settings_of_all = shared(config)
    for training in trainings:
        for key, value in shared(TrainConfig(**training.settings)).items():
            if value != settings_of_all[key]:
                tokens = training.settings["steps"] * training.settings["batch"] * training.settings["seq"]
                same = f"--tokens {tokens}" if key == "steps" else "the same"
                raise TrainError(
                    f"{file_of(folder, training.title, training.seed)} is of a training with {key} = {value!r}, and "
                    f"{key} = {settings_of_all[key]!r} is asked for: trainings that are compared have the same "
                    f"settings. Give {same}, or another directory with --out"
                )


def refuse_other_text(trainings: Iterable[Training], digest: str, folder: Path) -> None:
    """Raise an error if a training in ``folder`` was on another text."""
    for training in trainings:
        if training.text != digest:
            raise TrainError(
                f"{file_of(folder, training.title, training.seed)} was trained on another text ({training.source} of "
                "another machine, or changed since): restore the text, or give another directory with --out"
            )
