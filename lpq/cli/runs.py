"""The directory of a run of ``lpq train``, as far as other commands read it."""

from __future__ import annotations

from pathlib import Path

from lpq.registry.errors import LpqError

CONFIG = "config.toml"
"""The settings of a run, which show that a directory is one."""
RECIPE = "recipe"
"""The folder with the checkpoints of the training by recipe."""
NUMERICS = "numerics.jsonl"
"""The statistics of a training that was watched, in its folder."""
CURVES = "*-seed*.json"
"""The files of trainings, in the folder of a comparison."""


def checkpoint_in(path: Path) -> Path:
    """The checkpoints of the training by recipe if ``path`` is the directory of a run, and else ``path`` itself."""
    if any(path.glob(CURVES)) and all(one.suffix in (".json", ".md", ".svg") for one in path.iterdir()):
        raise LpqError(f"{path} is of lpq compare, which keeps no checkpoint: name the directory of a run of lpq train")
    return path / RECIPE if (path / CONFIG).is_file() else path
