"""A run whose numerics are watched, and ``lpq report``."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from training import MakeConfig

from lpq.__main__ import main
from lpq.observe import Readings
from lpq.registry.errors import LpqError
from lpq.train import resolve, run
from lpq.train.errors import TrainOptionError
from lpq.train.trainer import Trainer


def test_a_run_is_watched_and_reported(
    tiny: MakeConfig, console: Console, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its losses are what they are without it."""
    watched = run(tiny(watch=2, recipe="nvfp4", baseline=False, out=str(tmp_path / "run")), console)
    alone = run(tiny(recipe="nvfp4", baseline=False, out=str(tmp_path / "alone")), console)
    assert watched.outcomes[0].losses == alone.outcomes[0].losses
    readings = Readings.read(tmp_path / "run" / "recipe" / "numerics.jsonl").readings()
    assert sorted({one.step for one in readings}) == [2, 4, 6]
    main_of(["report", str(tmp_path / "run"), "--lines", "3"])
    said = capsys.readouterr().out
    assert "step 6, the most noise first" in said
    assert "more with less noise" in said
    assert "blocks" in (tmp_path / "run" / "numerics.html").read_text()
    with pytest.raises(SystemExit):
        main_of(["report", str(tmp_path / "alone")])
    assert "has no statistics: train with --watch 100" in capsys.readouterr().err


def test_a_run_is_asked_about_another_recipe(
    tiny: MakeConfig, console: Console, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Which changes no number of it, and may differ where it is resumed; a policy or a recipe without an error is
    refused before the first step."""
    out = tmp_path / "run"
    asked = run(tiny(watch=2, what_if="nvfp4", recipe="mxfp8", steps=4, baseline=False), console)
    alone = run(tiny("alone", recipe="mxfp8", steps=4, baseline=False), console)
    assert asked.outcomes[0].losses == alone.outcomes[0].losses
    readings = Readings.read(out / "recipe" / "numerics.jsonl").readings()
    formats = {one.recipe: one.format for one in readings if one.operand == "x.row"}
    assert formats == {"": "mxfp8", "nvfp4": "nvfp4"}
    main_of(["report", str(out), "--lines", "0"])
    assert " if nvfp4" in capsys.readouterr().out
    for index, (other, words) in enumerate(
        (
            ("nvfp4-late-switch", "is a policy and not a recipe"),
            ("fp8-delayed", r"what_if: fp8-delayed remembers earlier steps for fprop\.x, and none were by it"),
            ("bf16", "what_if: bf16 encodes nothing"),
        )
    ):
        with pytest.raises(LpqError, match=words):
            run(tiny(f"refused {index}", watch=2, what_if=other, baseline=False), console)
        assert not (tmp_path / f"refused {index}").exists()
    words = "what_if = 'nvfp4' needs --watch 100; for no question: --what-if ''"
    with pytest.raises(TrainOptionError, match=words):
        resolve({"resume": True, "out": str(out), "watch": 0})
    assert resolve({"resume": True, "out": str(out), "watch": 0, "what_if": ""}).watch == 0


def test_readings_that_are_broken_are_refused_before_the_next_step(
    tiny: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when the first checkpoint is due."""
    config = tiny(watch=2, recipe="mxfp8", baseline=False)
    folder = run(config, console).directory / "recipe"
    shutil.rmtree(folder / "step-00000006")
    (file := folder / "numerics.jsonl").write_text("{bad}\n" + file.read_text())
    done, advance = [], Trainer.advance
    monkeypatch.setattr(Trainer, "advance", lambda self: done.append(self.step) or advance(self))
    with pytest.raises(LpqError, match=r"numerics\.jsonl, line 1: this is no reading"):
        run(replace(config, resume=True), console)
    assert done == []


def test_a_report_without_a_run_asks_for_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main_of(["report"])
    assert "there is no run under runs/ to report on: name a run" in capsys.readouterr().err


@pytest.mark.parametrize(("watch", "recipe"), [(100, "nvfp4"), (1, "bf16")])
def test_a_report_on_a_run_without_a_line_says_why(
    watch: int, recipe: str, tiny: MakeConfig, console: Console, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(tiny(watch=watch, recipe=recipe, baseline=False, steps=2), console)
    with pytest.raises(SystemExit) as ended:
        main_of(["report", str(tmp_path / "run")])
    assert ended.value.code == 1
    assert "numerics.jsonl has no line: the run came to no step whose number" in capsys.readouterr().err
    assert not (tmp_path / "run" / "numerics.html").exists()


def test_a_report_on_what_is_no_run_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bf16-seed0.json").touch()
    for path, words in (
        (tmp_path / "nowhere", "nowhere does not exist: name the directory of a run"),
        (tmp_path, "is of lpq compare, which takes no statistics"),
    ):
        with pytest.raises(SystemExit) as ended:
            main_of(["report", str(path)])
        assert ended.value.code == 1
        assert words in capsys.readouterr().err


def main_of(arguments: list[str]) -> None:
    try:
        main(arguments)
    except SystemExit as end:
        if end.code:
            raise
