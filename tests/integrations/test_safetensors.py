"""Models that lpq prepared for sharding, written by safetensors: as an ordinary model is, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq

safetensors: Any = pytest.importorskip("safetensors.torch", reason="needs safetensors, which `make install` brings")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def test_a_weight_in_high_precision_is_ordinary_in_a_state_dict(tmp_path: Path) -> None:
    model = lpq.convert(net(), "mxfp8", weights="high_precision")
    state = model.state_dict()
    assert {type(t) for t in state.values()} == {Tensor}
    safetensors.save_model(net(), tmp_path / "ordinary")
    safetensors.save_model(model, tmp_path / "model")
    safetensors.save_file(state, tmp_path / "file")
    assert (tmp_path / "model").read_bytes() == (tmp_path / "ordinary").read_bytes()
    assert safetensors.load_file(tmp_path / "file").keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in safetensors.load_file(tmp_path / "file").items())


def test_what_is_written_to_a_state_dict_is_written_to_the_weight() -> None:
    model = lpq.convert(net(), "mxfp8", weights="high_precision")
    before = model[0].weight.write_count
    state = model.state_dict()
    state["0.weight"].zero_()
    assert not model[0].weight.any()
    assert model[0].weight.write_count > before  # so what was measured of it is measured again
    assert not state["0.weight"].requires_grad
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


def test_what_was_written_is_loaded(tmp_path: Path) -> None:
    safetensors.save_model(net(), tmp_path / "ordinary")
    model = lpq.convert(net().apply(_emptied), "mxfp8", weights="high_precision")
    assert not model[0].weight.any()
    safetensors.load_model(model, tmp_path / "ordinary")
    assert torch.equal(model[0].weight.detach(), net()[0].weight)


def _emptied(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_weight_that_is_stored_quantized_is_refused_in_words(recipe: str, tmp_path: Path) -> None:
    model = lpq.convert(net(), recipe, weights="quantized")
    words = r"0\.weight: this \[64, 64\] QuantizedTensor has no storage .*lpq\.export\(model, path, layout=.lpq."
    for write in (
        lambda: safetensors.save_model(model, tmp_path / "x"),
        lambda: safetensors.save_file(model.state_dict(), tmp_path / "x"),
        lambda: safetensors.save(dict(model.named_parameters())),
    ):
        with pytest.raises(TypeError, match=words):
            write()
    assert not (tmp_path / "x").exists()
    lpq.export(model, tmp_path / "y", layout="lpq", decode=True)  # the remedy
    ordinary = net()
    ordinary.load_state_dict(torch.load(tmp_path / "y", weights_only=True)["model"])
    assert torch.equal(ordinary[0].weight, model[0].weight.dequantize())


def test_a_parameter_that_is_gathered_quantized_is_refused_where_it_would_be_read_by_its_address() -> None:
    model = lpq.convert(net(), "mxfp8", weights="high_precision")
    for given in (model[0].weight, model[0].weight.detach()):
        with pytest.raises(TypeError, match=r"has no storage of its own.*call lpq\.integrations\.transformers\.attach"):
            safetensors.save({"weight": given})
