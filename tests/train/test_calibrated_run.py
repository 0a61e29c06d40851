"""``lpq calibrate`` of what ``lpq train`` trained: on the run's own text, and on that of the user."""

from __future__ import annotations

import tomllib
from pathlib import Path

import torch
from rich.console import Console
from support.commands import Command
from training import MakeConfig

import lpq
from lpq.train import run
from lpq.train.data import load
from lpq.train.machine import fast_bf16
from lpq.train.model import GPT, GPTShape


def calibrated(path: Path) -> dict[str, torch.Tensor]:
    """The static values of a checkpoint, loaded into a model of its policy."""
    info = lpq.checkpoint.info(path)
    model = lpq.convert(GPT(GPTShape(1, 2, 32)), info.policy)
    lpq.checkpoint.load(model, path)
    return {f"{n}.{key}": v for n, m in model.named_modules() if isinstance(m, lpq.nn.Layer)
            for key, v in m.static_values().items()}  # fmt: skip


def test_a_run_is_calibrated_on_its_own_text(
    tiny: MakeConfig, console: Console, tmp_path: Path, lpq_command: Command
) -> None:
    """Given as the directory of the run or as a checkpoint in it; control: another text gives other scales."""
    config = tiny(recipe="fp8-current", baseline=False)
    run(config, console)
    (of_recipe,) = Path(str(config.out)).glob("recipe*")
    (tmp_path / "other.txt").write_text("~}{|" * 4000)
    for name, source, more in (
        ("a", config.out, ()), ("b", of_recipe, ()), ("c", config.out, ("--data", tmp_path / "other.txt")),
    ):  # fmt: skip
        ended = lpq_command("calibrate", source, tmp_path / name, *more, "--samples", 8)
        assert ended.status == 0, ended.err
        assert "layers, from 8 samples" in ended.out
        assert "Signal to noise, in dB" in ended.out
    found = calibrated(tmp_path / "a")
    assert found
    assert all(torch.equal(value, calibrated(tmp_path / "b")[name]) for name, value in found.items())
    info = lpq.checkpoint.info(of_recipe)
    assert tomllib.loads(info.extra["config"])["batch"] == config.batch
    model = lpq.convert(GPT(GPTShape(1, 2, 32)), info.policy)
    lpq.checkpoint.load(model, of_recipe)
    text = load(config.data, config.seq)
    batches = [text.batch(config.seed, step, config.batch, config.seq)[0] for step in range(4)]
    with torch.autocast("cpu", torch.bfloat16, enabled=fast_bf16(torch.device("cpu"))):
        made = lpq.calibrate(model, batches, samples=8)
    assert all(torch.equal(value, found[name]) for name, value in made.values.items())
    other = calibrated(tmp_path / "c")
    assert not all(torch.equal(value, other[name]) for name, value in found.items())


def test_a_percentage_needs_its_method(tmp_path: Path, lpq_command: Command) -> None:
    ended = lpq_command("calibrate", tmp_path, tmp_path / "new", "--percentile", 50)
    assert (ended.status, "--percentile 50 needs --method percentile" in ended.err) == (2, True)
