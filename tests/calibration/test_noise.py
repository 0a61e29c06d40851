"""The signal-to-noise ratio of layers: what is said of it, and which layers come first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import data, layers, model
from support.commands import Command
from torch import Tensor, nn

import lpq
from lpq.calibration import CalibrationError, layer_noise
from lpq.core import QuantizedTensor


def test_it_is_that_of_the_output_and_of_the_weight() -> None:
    """Against the formula, for one layer whose input is the batch itself."""
    net = lpq.convert(nn.Sequential(nn.Linear(64, 48)), "fp8-current")
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    (found,) = layer_noise(net, [x[:16], x[16:]])
    with torch.no_grad():
        exact = nn.functional.linear(x, net[0].weight, net[0].bias).double()
        noise = torch.cat([net(x[:16]), net(x[16:])]).double() - exact
        w = lpq.quantizer("fp8").quantize(net[0].weight.detach()).dequantize().double()
    assert found.output == pytest.approx(10 * math.log10(exact.square().sum() / noise.square().sum()), abs=1e-6)
    weight = net[0].weight.detach().double()
    assert found.weight == pytest.approx(10 * math.log10(weight.square().sum() / (w - weight).square().sum()), abs=1e-6)
    assert net.training


def test_an_input_may_be_given_by_name() -> None:
    net, x = lpq.convert(nn.Linear(64, 48), "fp8-current"), torch.randn(32, 64)
    assert layer_noise(net, [{"input": x}]) == layer_noise(net, [x])


def test_the_noisiest_layer_comes_first_and_exact_ones_last() -> None:
    recipes = {"*q_proj": "nvfp4", "*k_proj": "x=identity, w=identity, dy=identity", "*v_proj": "fp8-current"}
    policy = {"rules": [{"match": match, "recipe": recipe} for match, recipe in recipes.items()]}
    net = lpq.convert(model(experts=0), policy)
    found = layer_noise(net, data(2))
    assert [noise.layer for noise in found] == ["0.attn.q_proj", "0.attn.v_proj", "0.attn.k_proj"]
    assert found[0].output < found[1].output < 60 < found[2].output
    assert found[2].weight == math.inf


def test_a_search_lessens_the_noise_of_weights() -> None:
    """Of every layer; that is what it is for."""
    found: dict[str, list[float]] = {}
    for method in ("max", "four_over_six", "mse"):
        net = lpq.convert(model(experts=1), "x=nvfp4, w=nvfp4(), dy=nvfp4")
        lpq.calibrate(net, data(2), method=method)  # type: ignore[arg-type]
        for noise in sorted(layer_noise(net, data(1)), key=lambda n: n.layer):
            found.setdefault(noise.layer, []).append(noise.weight)
    assert all(one < two < three for one, two, three in found.values()), found


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(CalibrationError, match="no layer has a recipe"):
        layer_noise(model(), data(1))
    with pytest.raises(CalibrationError, match="no batch went through a layer"):
        layer_noise(lpq.convert(model(), "nvfp4"), [])


def test_stored_weights_have_no_noise_of_their_own() -> None:
    net: Any = lpq.convert(model(experts=0), "fp8-current", weights="quantized")
    assert all(isinstance(layer.weight, QuantizedTensor) for layer in layers(net).values())
    found = layer_noise(net, data(1))
    assert len(found) == 4
    assert all(math.isnan(noise.weight) and noise.output > 20 for noise in found)


# ---------------------------------------------------------------------------------------------- the command


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def test_the_command_writes_a_calibrated_checkpoint_and_a_table(
    tmp_path: Path, lpq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("COLUMNS", "120")
    batches: list[Tensor] = [torch.randn(4, 64) for _ in range(3)]
    net = lpq.convert(made(), "fp8-current")
    lpq.checkpoint.save(net, tmp_path / "run")
    torch.save(batches, tmp_path / "data.pt")
    options = ("--model", "test_noise:made", "--data", tmp_path / "data.pt", "--samples", 8)
    ended = lpq_command("calibrate", tmp_path / "run", tmp_path / "out", *options)
    assert ended.status == 0
    said = ended.out
    assert "static scales by max in 2 layers, from 8 samples" in said
    lpq.calibrate(net, batches, samples=8)
    expected = [noise.layer for noise in layer_noise(net, batches)]
    rows = [line.split() for line in said.splitlines() if "fp8(static=true)" in line]
    assert [row[0] for row in rows] == expected
    assert float(rows[0][1]) <= float(rows[1][1])
    found = dict(lpq.export.stream(net, "compressed-tensors"))
    lpq.export(tmp_path / "out", tmp_path / "files", layout="compressed-tensors")
    read = lpq.load_quantized(made(), tmp_path / "files")
    again = dict(lpq.export.stream(read, "compressed-tensors"))
    assert found["0.input_scale"] == again["0.input_scale"]
    (tmp_path / "data.pt").write_bytes(b"x")
    for wrong, words in (
        ((), "was not written by lpq train: name the function that makes its model"),
        (("--method", "maximal"), "maximal"), (options, "cannot be read as batches"),
    ):  # fmt: skip
        ended = lpq_command("calibrate", tmp_path / "run", tmp_path / "b", *wrong)
        assert ended.status == 2
        assert words in ended.err


def takes_one(size: int) -> nn.Module:
    return nn.Linear(size, size)


def no_model() -> int:
    return 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "test_noise:takes_one"), "test_noise:takes_one cannot be called without arguments: missing a req"),
        (("--model", "test_noise:no_model"), "test_noise:no_model returns a int, and no torch.nn.Module"),
        (("--model", "test_noise:math"), "test_noise:math is of type module, and no function that makes the model"),
        (("--data", "wide.pt"), "the model does not take a batch of --data wide.pt: ValueError: layer 0, lpq"),
        (("--data", "words.pt"), "a batch is a str without a tensor"),
    ],
)  # fmt: skip
def test_the_command_refuses_in_words(
    options: tuple[str, str], words: str, tmp_path: Path, lpq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    lpq.checkpoint.save(lpq.convert(made(), "fp8-current"), "run")
    torch.save([torch.randn(4, 64)], "data.pt")
    torch.save([torch.randn(4, 65)], "wide.pt")
    torch.save(["a"], "words.pt")
    given = {"--model": "test_noise:made", "--data": "data.pt", options[0]: options[1]}
    ended = lpq_command("calibrate", "run", "out", *(text for pair in given.items() for text in pair))
    assert ended.status in (1, 2)
    assert f"lpq: {'--model: ' if options[0] == '--model' else ''}{words}" in ended.err
    assert not Path("out").exists()


def test_the_command_replaces_nothing(tmp_path: Path, lpq_command: Command) -> None:
    """A checkpoint would go, before a batch went through."""
    lpq.checkpoint.save(lpq.convert(made(), "fp8-current"), tmp_path / "run")
    before = (tmp_path / "run" / "lpq.json").read_bytes()
    ended = lpq_command("calibrate", tmp_path / "run", tmp_path / "run")
    assert ended.status == 1
    assert "run is there already: give another directory, or remove it" in ended.err
    assert (tmp_path / "run" / "lpq.json").read_bytes() == before
