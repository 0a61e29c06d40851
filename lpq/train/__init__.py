"""The main job, ``lpq train``: a small byte-level GPT, trained by recipe and then in bf16 from the same seed.

Importing this imports no torch; ``run`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpq.train.config import TrainConfig
from lpq.train.errors import Stopped, TrainError
from lpq.train.runs import resolve

if TYPE_CHECKING:
    from rich.console import Console

    from lpq.train.report import Summary

__all__ = ["Stopped", "TrainConfig", "TrainError", "resolve", "run"]


def run(config: TrainConfig, console: Console | None = None) -> Summary:
    """Train by ``config``, and report on ``console``; see ``lpq.train.loop.run``."""
    from lpq.train import loop

    return loop.run(config, console)
