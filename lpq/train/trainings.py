"""The results of trainings as files: a small JSON file for each, with its curves and what made them.

Nothing here imports torch: tables and figures are made of such files on any machine.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lpq.cli.runs import CURVES
from lpq.files.disk import json_of
from lpq.files.outputs import writable
from lpq.files.typed import check_table, typed
from lpq.train.config import TYPES, TrainConfig
from lpq.train.errors import GOES_ON, TrainError

SAME = "trainings that are compared have the same settings"
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
        loss = math.nan if self.diverged is not None else self.held_out[-1][1]
        return loss if math.isfinite(loss) else None

    @property
    def tokens_per_second(self) -> float:
        return float(self.settings["batch"] * self.settings["seq"] / self.step_seconds)

    def write(self, folder: Path) -> None:
        """Write the file of the training, which is whole or not there."""
        with writable(file_of(folder, self.title, self.seed), GOES_ON) as path:
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
    places: dict[tuple[str, int], Path] = {}
    every = [_read(path, places) for path in sorted(folder.glob(CURVES))]
    return sorted(every, key=lambda t: (not t.baseline, t.title, t.seed))


def _read(path: Path, places: dict[tuple[str, int], Path]) -> Training:
    """Read a file, and note the training among the ``places`` of others."""
    try:
        training = typed(Training, json_of(path.read_text(encoding="utf-8")))
        check_table(training.settings, TYPES, ("steps", "batch", "seq"), others=True)
        if training.diverged is None and not (training.held_out and training.losses):
            raise ValueError("it has no held-out loss, or no training loss")
        if training.step_seconds <= 0:
            raise ValueError(f"step_seconds = {training.step_seconds} is no time")
        other = places.setdefault((training.title, training.seed), path)
        if other != path:
            raise ValueError(f"{other.name} has the training by {training.title} from seed {training.seed} already")
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TrainError(f"{path} is no curve of lpq compare ({error}): move it away") from error
    return training


def shared(config: TrainConfig) -> dict[str, object]:
    """The settings that all trainings of a comparison have in common."""
    return {key: value for key, value in config.settings().items() if key not in OF_ONE}


def refuse_others(trainings: Sequence[Training], folder: Path, config: TrainConfig | None = None) -> None:
    """Raise an error if a training in ``folder`` had other settings than ``config``, or than the first one."""
    usual = shared(TrainConfig())
    every = [{**usual, **{k: tuple(v) if isinstance(v, list) else v for k, v in t.settings.items()}} for t in trainings]
    if config is None:  # a recipe alone may have stored weights, and what a script notes beside the settings
        every = [{k: settings[k] for k in usual if k != "weights"} for settings in every]
    settings_of_all = shared(config) if config is not None else every[0] if every else {}
    for training, settings in zip(trainings, every, strict=True):
        place = file_of(folder, training.title, training.seed)
        for key in [*settings_of_all, *settings]:
            ours, theirs = settings_of_all.get(key), settings.get(key)
            if ours != theirs:
                tokens = math.prod(training.settings[one] for one in ("steps", "batch", "seq"))
                same = f"--tokens {tokens}" if key == "steps" else "the same"
                asked = f"is asked for: {SAME}. Give {same}, or another directory with --out"
                first = f"is of {trainings[0].title}: {SAME}. Move the files of one of them to another directory"
                raise TrainError(
                    f"{place} is of a training with {key} = {theirs!r}, and {key} = {ours!r} "
                    f"{asked if config is not None else first}"
                )


def refuse_other_baseline(trainings: Iterable[Training], title: str, folder: Path) -> None:
    """Raise an error if a baseline in ``folder`` is another one."""
    for training in trainings:
        if training.baseline and training.title != title:
            raise TrainError(
                f"{file_of(folder, training.title, training.seed)} is a baseline, and {title} is, too: recipes are "
                f"compared with one. Move the files of {training.title} away, or name another directory with --out"
            )


def refuse_other_text(trainings: Iterable[Training], digest: str, folder: Path) -> None:
    """Raise an error if a training in ``folder`` was on another text."""
    for training in trainings:
        if training.text != digest:
            raise TrainError(
                f"{file_of(folder, training.title, training.seed)} was trained on another text ({training.source} of "
                "another machine, or changed since): restore the text, or give another directory with --out"
            )


def refuse_other_policies(trainings: Iterable[Training], policies: Mapping[str, str]) -> None:
    """Raise an error if a training had another policy than the one of its title."""
    for training in trainings:
        if policies.get(training.title, training.policy) != training.policy:
            raise TrainError(
                f"{training.title} is another recipe than the trainings that are there have: give it another name, "
                f"or another directory with --out. Theirs is:\n{training.policy}"
            )


def refuse_other_weights(trainings: Iterable[Training], folder: Path) -> None:
    """Raise an error if trainings of one title, from several seeds, had weights that were stored in several ways."""
    stored: dict[str, object] = {}
    for training in trainings:
        own = training.settings.get("weights")
        if (other := stored.setdefault(training.title, own)) != own:
            raise TrainError(
                f"{file_of(folder, training.title, training.seed)} is of a training with weights = {own!r}, and the "
                f"mean of {training.title} has one with weights = {other!r}: move the files of one of them to another "
                "directory"
            )


def refuse_mixed(trainings: Sequence[Training], folder: Path) -> None:
    """Raise an error if the trainings in ``folder`` are not of one comparison."""
    refuse_others(trainings, folder)
    refuse_other_weights(trainings, folder)
    for training in trainings[:1]:
        refuse_other_text(trainings, training.text, folder)
        refuse_other_baseline(trainings, training.title, folder)
