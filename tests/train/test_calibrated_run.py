"""``lpq calibrate`` of what ``lpq train`` trained: on the run's own text, and on that of the user."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console
from training import MakeConfig

import lpq
from lpq.__main__ import main
from lpq.train import run
from lpq.train.data import load
from lpq.train.machine import fast_bf16
from lpq.train.model import GPT, Shape


def command(*arguments: object) -> None:
    with pytest.raises(SystemExit) as end:
        main(["calibrate", *map(str, arguments), "--samples", "8"])
    assert not end.value.code


def calibrated(path: Path) -> dict[str, torch.Tensor]:
    """The static values of a checkpoint, loaded into a model of its policy."""
    info = lpq.checkpoint.info(path)
    model = lpq.convert(GPT(Shape(1, 2, 32)), info.policy)
    lpq.checkpoint.load(model, path)
    return {f"{n}.{key}": v for n, m in model.named_modules() if isinstance(m, lpq.nn.Layer)
            for key, v in m.static_values().items()}  # fmt: skip


def test_a_run_is_calibrated_on_its_own_text(
    tiny: MakeConfig, console: Console, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given as the directory of the run or as a checkpoint in it; control: another text gives other scales."""
    config = tiny(recipe="fp8-current", baseline=False)
    run(config, console)
    command(config.out, tmp_path / "a")
    said = capsys.readouterr().out
    assert "layers, from 8 samples" in said
    assert "Signal to noise, in dB" in said
    (of_recipe,) = Path(config.out).glob("recipe*")
    command(of_recipe, tmp_path / "b")
    found = calibrated(tmp_path / "a")
    assert found
    assert all(torch.equal(value, calibrated(tmp_path / "b")[name]) for name, value in found.items())
    info = lpq.checkpoint.info(of_recipe)
    assert tomllib.loads(info.extra["config"])["batch"] == config.batch
    model = lpq.convert(GPT(Shape(1, 2, 32)), info.policy)
    lpq.checkpoint.load(model, of_recipe)
    text = load(config.data, config.seq)
    batches = [text.batch(config.seed, step, config.batch, config.seq)[0] for step in range(4)]
    with torch.autocast("cpu", torch.bfloat16, enabled=fast_bf16(torch.device("cpu"))):
        made = lpq.calibrate(model, batches, samples=8)
    assert all(torch.equal(value, found[name]) for name, value in made.values.items())
    (tmp_path / "other.txt").write_text("~}{|" * 4000)
    command(config.out, tmp_path / "c", "--data", tmp_path / "other.txt")
    other = calibrated(tmp_path / "c")
    assert not all(torch.equal(value, other[name]) for name, value in found.items())
