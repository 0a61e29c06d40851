"""The command line passes on exactly what was given."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lpq.train import Stopped, TrainConfig
from lpq.train.commands import train as command


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command("train")(command.train)
    return app


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    configs: list[TrainConfig] = []
    monkeypatch.setattr(command, "run", configs.append)
    return configs


def test_every_option_reaches_the_configuration(app: typer.Typer, ran: list[TrainConfig]) -> None:
    said: dict[str, Any] = {
        "recipe": "nvfp4", "baseline": False, "steps": 11, "batch": 3, "seq": 24, "lr": 0.5, "seed": 4,
        "layers": 1, "heads": 1, "width": 16, "data": ("a", "b"), "device": "cpu", "compile": True, "threads": 2,
        "out": "o", "checkpoint_every": 0, "weights": "quantized", "full": True,
    }  # fmt: skip
    assert {f.name for f in fields(TrainConfig)} == {*said, "policy", "resume"}
    arguments = []
    for name, value in said.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for item in value if isinstance(value, tuple) else (value,):
                arguments += [f"--{flag}", str(item)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert ran == [TrainConfig(**said)]


def test_what_is_not_given_comes_from_the_file(app: typer.Typer, ran: list[TrainConfig], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('steps = 5\nbaseline = false\nseed = 3\ndevice = "cpu"\n')
    CliRunner().invoke(app, ["--config", str(file), "--seed", "0"], catch_exceptions=False)
    assert ran == [TrainConfig(device="cpu", steps=5, baseline=False, seed=0)]


def test_a_stopped_run_exits_as_the_signal_does(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: TrainConfig) -> None:
        raise Stopped("stopped after step 3", 15)

    monkeypatch.setattr(command, "run", run)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 143
    assert "stopped after step 3" in result.output
