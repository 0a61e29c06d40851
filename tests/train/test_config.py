"""Where an option's value comes from, and what is said when it cannot be right."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from lpq.train import Stopped, TrainConfig, TrainError, gpu_size, machine, resolve, runs
from lpq.train.commands import train as command
from lpq.train.errors import TrainOptionError


def stored(directory: Path, config: TrainConfig) -> TrainConfig:
    directory.mkdir(parents=True)
    (directory / runs.CONFIG).write_text(config.to_toml(), encoding="utf-8")
    return config


def test_the_command_line_beats_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('steps = 7\nlr = 1\nrecipe = "nvfp4"\ndata = ["a", "b"]\nbaseline = false\n')
    config = resolve({"steps": 9, "device": "cpu"}, file)
    expected = TrainConfig(device="cpu", steps=9, lr=1.0, recipe="nvfp4", data=("a", "b"), baseline=False)
    assert config == expected
    assert resolve({"device": "cpu"}) == TrainConfig(device="cpu")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stepz = 3", r"c\.toml: nothing is named 'stepz': did you mean 'steps'\?"),
        ("xyzzy = 3", r"nothing is named 'xyzzy': choose from .*recipe"),
        ("steps = '3'", r"steps = '3' must be a whole number"),
        ("steps = true", r"steps = True must be a whole number"),
        ("lr = 'high'", r"lr = 'high' must be a number"),
        ("compile = 1", r"compile = 1 must be a boolean"),
        ("data = 'here'", r"data = 'here' must be a list of strings"),
        ("steps = 0", r"steps = 0: it must be at least 1"),
        ("lr = nan", r"lr = nan: it must be at least 0"),
        ("heads = 3", r"width = 128 does not give each of heads = 3 an even number"),
        ("weights = 'quantised'", r"weights = 'quantised': did you mean 'quantized'\?"),
        ("schedule = 'wds'", r"schedule = 'wds': did you mean 'wsd'\?"),
        ("warmup = 1.0", r"warmup = 1\.0 leaves no step after it"),
        ("clip = 0.0", r"clip = 0 would leave no gradient"),
        ("lr = 0", r"lr = 0 would leave the weights as they are"),
        ("seq = 1", r"seq = 1: it must be at least 2"),
        ("steps", r"is not TOML"),
        ("recipe = 'nvfp4'\npolicy = 'p.toml'", r"a recipe or a policy, not both"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(line)
    with pytest.raises(TrainError, match=words):
        resolve({}, file)


@pytest.mark.parametrize("option", [{"watch": 10}, {"replay": True}, {"promote": 5}])
def test_a_recorded_training_cannot_be_watched(option: dict[str, Any]) -> None:
    with pytest.raises(TrainError, match="leave out --record, or --watch, --replay and --promote"):
        TrainConfig(record=True, **option)


def test_an_absent_file_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"absent\.toml cannot be read: No such file .*; name another file"):
        resolve({}, tmp_path / "absent.toml")


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(policy="my policy.toml", out='o"dd\\näme\x7f', data=("a", "b c"), lr=3e-5, baseline=False),
        TrainConfig(out="läufe/🦊", data=("数据.txt", "tab\tand \u2028, \x85, \x01")),
    ],
)
def test_what_is_written_is_read_again(tmp_path: Path, config: TrainConfig) -> None:
    stored(tmp_path / "run", config)
    assert runs.stored_config(tmp_path / "run") == config
    assert "resume" not in tomllib.loads(config.to_toml())


def test_a_resumed_run_brings_its_own_options(tmp_path: Path) -> None:
    config = stored(tmp_path / "run", TrainConfig(recipe="mxfp8", steps=17))
    out = str(tmp_path / "run")
    resumed = resolve({"resume": True, "out": out, "checkpoint_every": 3, "recipe": "mxfp8"})
    assert resumed == replace(config, resume=True, out=out, checkpoint_every=3)
    with pytest.raises(TrainError, match=r"has recipe = 'mxfp8' and cannot go on with 'nvfp4': leave recipe out"):
        resolve({"resume": True, "out": out, "recipe": "nvfp4"})
    with pytest.raises(TrainError, match=r"steps = 17 and cannot go on with 18 \(the learning rate's schedule"):
        resolve({"resume": True, "out": out, "steps": 18})


def test_a_run_goes_on_with_the_data_that_it_has(tmp_path: Path) -> None:
    """A file and a command line have a list of them."""
    config = stored(tmp_path / "run", TrainConfig(data=("a", "b")))
    (file := tmp_path / "c.toml").write_text('data = ["a", "b"]\n')
    own = {"resume": True, "out": str(tmp_path / "run")}
    expected = replace(config, **own)
    assert [resolve(own, file), resolve({**own, "data": ["a", "b"]})] == [expected] * 2
    with pytest.raises(TrainError, match=r"has data = \('a', 'b'\) and cannot go on with \('a',\)"):
        resolve({**own, "data": ["a"]})


def test_resume_takes_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainError, match=r"no run under runs/ to resume"):
        resolve({"resume": True})
    first, second = (runs.open_directory(TrainConfig(steps=steps)) for steps in (5, 6))
    assert first.name == "fprop-mxfp8-dgrad-nvfp4-wgrad-bf16"
    assert second.name == f"{first.name}-2"
    assert resolve({"resume": True}).steps == 6
    assert resolve({"resume": True, "out": str(first)}).steps == 5


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    config = TrainConfig(out=str(tmp_path / "run"))
    runs.open_directory(config)
    with pytest.raises(TrainError, match=r"already holds a run: continue it with --resume"):
        runs.open_directory(config)
    assert runs.open_directory(replace(config, resume=True)) == tmp_path / "run"
    with pytest.raises(TrainError, match=r"has seed = 0 and cannot go on with 1"):
        runs.open_directory(replace(config, resume=True, seed=1))
    with pytest.raises(TrainError, match=r"there is no run in .*other to resume"):
        runs.open_directory(replace(config, resume=True, out=str(tmp_path / "other")))


def test_a_run_that_fails_before_its_first_step_leaves_what_was_there(tmp_path: Path) -> None:
    config = TrainConfig(out=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").write_text("mine")
    with pytest.raises(ZeroDivisionError), runs.opened(config) as directory:
        raise ZeroDivisionError
    assert [path.name for path in directory.iterdir()] == ["notes"]

    def begins() -> None:
        with runs.opened(config) as directory:
            (directory / "recipe").mkdir()
            (directory / "recipe" / runs.METRICS).write_text("{}\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        begins()
    assert runs.begun(directory)
    assert (directory / runs.CONFIG).exists()


def test_a_run_is_titled_by_its_recipe_or_its_file() -> None:
    assert TrainConfig(recipe="nvfp4(block=1x16)").title == "nvfp4(block=1x16)"
    assert TrainConfig(recipe="here/narrow.toml").title == "narrow"
    assert TrainConfig(policy="here/layers.toml").title == "layers"


def test_help_needs_no_torch() -> None:
    code = "import lpq.train.commands.train, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_directory_that_cannot_be_is_refused_in_words(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match=r"no run can be kept in .*file.*; name another directory with --out"):
        runs.open_directory(TrainConfig(out=str(tmp_path / out)))


@pytest.mark.parametrize("options", [{"seed": 10**25}, {"lr": float("inf")}])
def test_numbers_that_are_too_large_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TrainOptionError, match="it must be less than 9223372036854775808"):
        TrainConfig(**options)


# ---------------------------------------------------------------------------------------------- command


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


@pytest.mark.parametrize("instead", [{}, {"record": True, "watch": 0, "what_if": "", "replay": False, "promote": 0}])
def test_every_option_reaches_the_configuration(
    app: typer.Typer, ran: list[TrainConfig], instead: dict[str, Any]
) -> None:
    said: dict[str, Any] = {
        "recipe": "nvfp4", "baseline": False, "second_seed": False, "steps": 11, "batch": 3, "seq": 24, "lr": 0.5,
        "seed": 4, "layers": 1, "heads": 1, "width": 16, "data": ("a", "b"), "device": "cpu", "compile": True,
        "threads": 2, "out": "o", "checkpoint_every": 0, "weights": "quantized", "full": True,
        "schedule": "wsd", "warmup": 0.25, "weight_decay": 0.5, "clip": 2.0, "text": 3, "validate_every": 5, "watch": 7,
        "replay": True, "promote": 9, "record": False, "what_if": "mxfp8",
    } | instead  # fmt: skip
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


# ---------------------------------------------------------------------------------------------- gpu size


CPU = {"device": "cpu"}


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let PyTorch report one GPU of some compute capability."""

    def make(found: tuple[int, int], cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return make


def test_the_size_is_the_gpus_where_none_is_named(capability: Any) -> None:
    capability((9, 0))
    found = resolve({})
    assert (found.recipe, found.width, found.layers, found.seq * found.batch) == ("fp8-current", 4096, 2, 8192)
    assert "4096 wide" in str(gpu_size.note(found, torch.device("cuda")))
    assert resolve({"recipe": "mxfp8"}).recipe == "mxfp8"
    assert resolve({"recipe": "mxfp8"}).width == 4096
    assert resolve({"policy": "p.toml"}) == TrainConfig(policy="p.toml", **gpu_size.SIZE, **gpu_size.BESIDE)
    assert resolve({"checkpoint_every": 7}).checkpoint_every == 7


def test_one_option_of_the_size_keeps_all_of_it(capability: Any) -> None:
    capability((8, 9))
    found = resolve({"width": 256})
    assert found == TrainConfig(recipe="fp8-current", width=256)
    assert "from a width of about 4096" in str(gpu_size.note(found, torch.device("cuda")))


def test_elsewhere_nothing_changes(capability: Any) -> None:
    capability((9, 0))
    assert resolve(CPU) == TrainConfig(**CPU)
    assert gpu_size.note(TrainConfig(**CPU), torch.device("cpu")) is None
    capability((8, 0))
    assert resolve({}) == TrainConfig()
    assert "save no time" in str(gpu_size.note(TrainConfig(), torch.device("cuda")))
    capability((9, 4), cuda=None)  # what AMD's GPUs report
    assert not machine.multiplies_fp8(torch.device("cuda"))
