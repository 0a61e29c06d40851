"""The options of ``lpq compare``, and its sizes. Nothing here imports torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lpq.registry.errors import suggestion
from lpq.train.config import INSTALLED, TrainConfig
from lpq.train.errors import TrainOptionError
from lpq.train.trainings import file_of, plain_name

GPU: Mapping[str, Any] = MappingProxyType(
    {"seq": 1024, "batch": 64, "data": (INSTALLED,), "text": 256, "compile": True}
)
"""The settings of the sizes that fill a GPU."""
SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "toy": {"layers": 2, "heads": 2, "width": 64, "seq": 64, "batch": 8, "lr": 4e-3, "tokens": 80_000},
        "5m": {"layers": 4, "heads": 4, "width": 320, "seq": 256, "batch": 32, "lr": 2e-3, "tokens": 8_000_000},
        "30m": {**GPU, "layers": 6, "heads": 5, "width": 640, "lr": 1.2e-3, "tokens": 200_000_000},
        "60m": {**GPU, "layers": 9, "heads": 6, "width": 768, "lr": 1e-3, "tokens": 200_000_000},
        "150m": {**GPU, "layers": 12, "heads": 8, "width": 1024, "lr": 8e-4, "tokens": 500_000_000},
        "400m": {**GPU, "layers": 21, "heads": 10, "width": 1280, "lr": 5e-4, "batch": 32, "tokens": 1_000_000_000},
    }
)
"""The model of each size by its weights, the batch, and the tokens, which are bytes, that it is trained on."""
SHARED = (
    "layers", "heads", "width", "batch", "seq", "lr", "schedule", "warmup", "weight_decay", "clip", "data", "text",
    "device", "threads", "compile", "record", "validate_every", "checkpoint_every",
)  # fmt: skip
"""The options of a training that ``lpq compare`` has, too."""
TIMES = 4
"""How many times a training is validated and saved by default."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True)
class TrainingJob:
    """One training of a comparison; without a policy it is the baseline."""

    title: str
    config: TrainConfig
    curve: Path
    """The file that it ends with."""
    command: str
    text: str = ""
    """The digest of the text that the comparison began with."""
    rules: str = ""
    """The policy that it began with; empty for the baseline."""

    @property
    def name(self) -> str:
        """The training in messages."""
        return f"{self.title}, seed {self.config.seed}"


@dataclass(frozen=True)
class CompareConfig:
    """A comparison: recipes beside the baseline, for seeds from 0 on."""

    recipes: tuple[str, ...]
    """Recipes and policies: names, the grammar, or TOML files; none: only tell what is there."""
    seeds: int
    training: TrainConfig
    """The settings that all trainings have in common."""
    out: Path
    at_once: int | None
    time_limit: float | None
    command: str = ""
    """The command, as it stands in the files of the trainings."""
    beside: str | None = None
    """The recipe that the others are compared with as well."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise TrainOptionError(f"seeds = {self.seeds}: it must be at least 1")
        names: dict[str, str] = {}
        for recipe in self.recipes:
            if (name := plain_name(title_of(recipe))) in names:
                raise TrainOptionError(
                    f"{recipe} and {names[name]} would have the same files: name each recipe once, or put one into a "
                    "TOML file with another name"
                )
            names[name] = recipe

    def jobs(self, baseline: str) -> list[TrainingJob]:
        """All trainings, seed by seed, each seed's baseline first: so pairs are complete early."""
        sources = {baseline: None, **{title_of(recipe): recipe for recipe in self.recipes}}
        if len(sources) == len(self.recipes):
            raise TrainOptionError(f"{baseline} is what every recipe is compared with: leave it out")
        return [self._job(title, source, seed) for seed in range(self.seeds) for title, source in sources.items()]

    def _job(self, title: str, source: str | None, seed: int) -> TrainingJob:
        directory = self.unfinished / f"{plain_name(title)}-{seed}"
        config = replace(self.training, policy=source, seed=seed, out=str(directory))
        return TrainingJob(title, config, file_of(self.out, title, seed), self.command)

    @property
    def unfinished(self) -> Path:
        """The folder with the checkpoints of trainings that were cut off."""
        return self.out / "unfinished"


def title_of(recipe: str) -> str:
    """The name of a recipe, or the name of its file."""
    return Path(recipe).stem if recipe.endswith(".toml") else recipe


def training(size: str, tokens: str | None, options: Mapping[str, Any]) -> TrainConfig:
    """The settings of all trainings: a size, ``options`` in place of its settings, and as many steps as there are
    batches in ``tokens``, one at least."""
    if size not in SIZES:
        raise TrainOptionError(f"size = {size!r}: {suggestion(size, SIZES)}")
    settings = {**SIZES[size], **options}
    token_count = count(tokens) if tokens is not None else SIZES[size]["tokens"]
    del settings["tokens"]
    config = TrainConfig(**{**settings, "baseline": False})
    if token_count < (each := config.batch * config.seq):
        raise TrainOptionError(f"tokens = {token_count}: a step reads {each}, --batch times --seq: give {each} or more")
    steps = round(token_count / each)
    part = max(1, steps // TIMES)
    return replace(
        config,
        steps=steps,
        validate_every=options.get("validate_every", part) or steps,
        checkpoint_every=options.get("checkpoint_every", part),
    )


def count(text: str) -> int:
    """A number of tokens, as 200M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", text.strip().lower())
    if match is None or not (number := int(float(match[1]) * UNITS[match[2]])):
        raise TrainOptionError(f"tokens = {text!r}: a number of tokens is wanted, as 500k, 200M or 1G")
    return number


def processors(threads: int) -> int:
    """How many trainings this machine's processors take at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads) if threads else 1
