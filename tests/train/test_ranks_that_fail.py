"""A failure on the first rank alone, as it writes: all ranks have the same error, soon, and none waits for it."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import spawn
from rich.console import Console
from training import MakeConfig

from lpq.train import TrainConfig, TrainError, loop, run, runs

SOON = 60
"""Seconds, of which most are spent on making models; the group would wait for two minutes."""


class Unspeakable(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("the disk is full")
        self.held = lambda: None


def _refused(config: TrainConfig) -> str:
    """Return the error that ends the run, which must be the same on all ranks."""
    began = time.monotonic()
    with pytest.raises(TrainError) as raised:
        run(config, Console(file=io.StringIO()))
    assert time.monotonic() - began < SOON
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, str(raised.value))
    assert len(set(found)) == 1, found
    return found[0]


def _a_directory_that_holds_a_run(rank: int, config: TrainConfig) -> None:
    directory = Path(str(config.out))
    assert f"{directory} already holds a run: continue it with --resume" in _refused(config)
    assert (directory / runs.CONFIG).read_text() == "somebody's"


def refuse(*_: object) -> None:
    raise Unspeakable


def _a_report_that_cannot_be_written(rank: int, config: TrainConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "tell_conversion", refuse)
        assert "Unspeakable: the disk is full (test_ranks_that_fail.py, line" in _refused(config)
    assert not Path(str(config.out)).exists()  # a run that has done no step leaves nothing


def _metrics_that_cannot_be_written(rank: int, config: TrainConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.os, "truncate", refuse)
        assert "Unspeakable: the disk is full" in _refused(config)


def test_a_directory_that_holds_a_run_is_refused_on_all_ranks(tiny: MakeConfig) -> None:
    config = tiny()
    directory = Path(str(config.out))
    directory.mkdir()
    (directory / runs.CONFIG).write_text("somebody's")
    spawn(_a_directory_that_holds_a_run, 2, config)


def test_a_report_that_cannot_be_written_ends_all_ranks(tiny: MakeConfig) -> None:
    spawn(_a_report_that_cannot_be_written, 2, tiny())


def test_metrics_that_cannot_be_written_end_all_ranks(tiny: MakeConfig) -> None:
    spawn(_metrics_that_cannot_be_written, 2, tiny())
