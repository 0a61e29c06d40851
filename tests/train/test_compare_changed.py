"""A comparison trains on, and by, what was there when it began; what no training can begin by is refused before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import Command

from lpq.train import TrainError, compare
from lpq.train.compare_config import CompareConfig, training


@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.starts)])
@pytest.mark.parametrize("what", ["the text", "the policy"])
def test_a_training_refuses_what_changed_after_the_comparison_began(
    what: str, at_once: int, text: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text('rules = [{match = "*.up", recipe = "mxfp8"}]')
    size = {"layers": 1, "heads": 1, "width": 16, "seq": 16, "batch": 2, "device": "cpu"}
    settings = training("toy", "192", {**size, "data": (str(text),), "validate_every": 4, "checkpoint_every": 4})
    config = CompareConfig((str(policy),), 1, settings, tmp_path / "out", at_once, None)
    changed, before = (text, "squared") if what == "the text" else (policy, "up")
    whole = changed.read_text()
    assert before in whole
    run: Callable[..., Any] = compare._work

    def change_and_run(*arguments: Any) -> Any:
        changed.write_text(whole.replace(before, "down"))
        return run(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(compare, "_work", change_and_run)
        with pytest.raises(TrainError, match=r"seed 0: .*changed since the comparison began: restore what it was"):
            compare.run(config, console)
    assert not (tmp_path / "out" / "mine-seed0.json").exists()
    changed.write_text(whole)
    assert len(compare.run(config, console)) == 2


@pytest.mark.parametrize("recipe", ["fp8(static=true)", "fprop=mxfp8, dgrad=bf16, wgrad=fp8(static=true)"])
@pytest.mark.parametrize("command", [("compare", "mxfp8"), ("train", "--policy")])
def test_static_scales_are_refused_before_anything_trains(
    command: tuple[str, str], recipe: str, tmp_path: Path, lpq_command: Command
) -> None:
    ended = lpq_command(*command, recipe, "--out", tmp_path / "out", "--device", "cpu")
    assert ended.status == 2
    assert " has static scales (" in ended.err
    assert "): train by one that measures them, then run lpq calibrate" in " ".join(ended.err.split())
    assert "Traceback" not in ended.err
    assert not (tmp_path / "out").exists()
