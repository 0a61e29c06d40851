"""A failure on the first rank alone, as it writes: all ranks have the same error, soon, and none waits for it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import all_say, spawn
from rich.console import Console
from training import MakeConfig

from lpq.train import TrainConfig, loop, run, runs


class Unspeakable(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("the disk is full")
        self.held = lambda: None


def refuse(*_: object) -> None:
    raise Unspeakable


def _runs(config: TrainConfig) -> Callable[[], object]:
    return lambda: run(config, Console(file=io.StringIO()))


def _a_directory_that_holds_a_run(rank: int, config: TrainConfig) -> None:
    directory = Path(str(config.out))
    all_say(_runs(config), rf"{directory} already holds a run: continue it with --resume")
    assert (directory / runs.CONFIG).read_text() == "somebody's"


def _a_report_that_cannot_be_written(rank: int, config: TrainConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "tell_conversion", refuse)
        all_say(_runs(config), r"Unspeakable: the disk is full \(test_ranks_that_fail\.py, line")
    assert not Path(str(config.out)).exists()  # a run that has done no step leaves nothing
    dist.barrier()  # before another rank makes it again


def _metrics_that_cannot_be_written(rank: int, config: TrainConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.os, "truncate", refuse)
        all_say(_runs(config), "Unspeakable: the disk is full")


def _each(rank: int, held: TrainConfig, config: TrainConfig) -> None:
    _a_directory_that_holds_a_run(rank, held)
    _a_report_that_cannot_be_written(rank, config)
    _metrics_that_cannot_be_written(rank, config)


def test_a_failure_of_the_first_rank_ends_all(tiny: MakeConfig) -> None:
    held = tiny("held")
    directory = Path(str(held.out))
    directory.mkdir()
    (directory / runs.CONFIG).write_text("somebody's")
    spawn(_each, 2, held, tiny())
