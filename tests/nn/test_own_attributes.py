"""Attributes that a user gave a module, and that a class of lpq would take: refused before anything is changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hugging_face import small
from support.small_models import linears
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import lpq
from lpq.core import Quantizer
from lpq.integrations.decoded import attach

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
GIVEN: dict[str, Callable[[Any], object]] = {
    "gather": lambda layer: layer.register_parameter("gather", nn.Parameter(torch.ones(3))),
    "passes": lambda layer: layer.register_buffer("passes", torch.ones(3)),
    "model": lambda layer: layer.add_module("model", nn.Linear(2, 2)),
    "title": lambda layer: setattr(layer, "title", "mine"),
    "transposed": lambda layer: setattr(layer, "transposed", True),
    "hold_weight": lambda layer: setattr(layer, "hold_weight", lambda: None),
}


def content(model: nn.Module) -> list[Any]:
    """All that modules have, and their classes."""
    tables = [[type(m), *vars(m).items(), *m._parameters.items(), *m._modules.items()] for m in model.modules()]
    return [[value.copy() if isinstance(value, dict) else value for value in table] for table in tables]


def other_linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), Conv1D(64, 64), nn.Linear(64, 64))


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("weights", [None, "high_precision"])
def test_a_name_of_lpq_is_refused(name: str, weights: Any) -> None:
    for at, model in enumerate([linears(64, 64, 64), other_linear()], 1):
        GIVEN[name](model[1])
        before = content(model)
        with pytest.raises(ValueError, match=rf"^1: its {name} would be lost, as a layer of lpq .*: rename yours"):
            lpq.convert(model, "mxfp8", weights=weights)
        assert content(model) == before
        rules = [{"match": ["1"], "recipe": "skip"}, {"match": ["*"], "recipe": "mxfp8"}]
        lpq.convert(model, {"rules": rules}, weights=weights)
        assert len(lpq.report(model).converted) == at, "the others"
        assert hasattr(model[1], name)


def test_a_name_of_lpq_on_experts_is_refused() -> None:
    model = small("Mixtral")
    name, experts = next((n, m) for n, m in model.named_modules() if n.endswith("experts"))
    experts.dispatched = "mine"
    before = content(model)
    with pytest.raises(ValueError, match=rf"^{name}: its dispatched would be lost"):
        lpq.convert(model, "mxfp8")
    assert content(model) == before


def test_a_plugin_s_layer_is_refused_as_well() -> None:
    linear = nn.Linear(64, 64)
    linear.states = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match="a Linear: its states would be lost"):
        lpq.nn.Linear.adopt(linear, "mxfp8")
    assert type(linear) is nn.Linear


def test_attributes_of_other_names_stay() -> None:
    model = linears(64, 64)
    model[0].mine, model[0]._is_hf_initialized = "mine", True
    model[0].weight.allreduce = False  # type: ignore[attr-defined]
    lpq.convert(model, "mxfp8")
    assert (model[0].mine, model[0]._is_hf_initialized, model[0].weight.allreduce) == ("mine", True, False)  # type: ignore[attr-defined]


def test_a_quantizer_that_saves_a_model_is_not_replaced() -> None:
    model, mine = small("Llama"), object()
    model.hf_quantizer = mine
    assert attach(model) is model
    lpq.convert(model, "mxfp8", weights="quantized")
    with pytest.raises(ValueError, match=r"object saves this model, .*: convert it without weights='quantized'"):
        attach(model)
    assert model.hf_quantizer is mine


class Norm(nn.Module):
    """A norm with a method that has the name of an attribute of lpq's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-5

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = norm, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.first(x))
        return out


def test_a_norm_that_would_lose_a_method_is_left_as_it_is() -> None:
    """It failed in a pass that runs as before, such as one under autocast."""
    model = lpq.convert(nn.Sequential(Block(Norm())), "mxfp8", fuse=True)
    assert type(model[0].first) is Norm
    assert "its norm would be lost" in str(lpq.report(model))
    with torch.autocast("cpu"):
        assert model(X).shape == X.shape


def test_weights_are_freed_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fits on a device once does not fit there twice."""
    model = linears(64, 64, 64, 64)
    former, alive = [weakref.ref(layer.weight) for layer in model], []
    quantize = Quantizer.quantize

    def counts(self: Any, *args: Any, **kwargs: Any) -> Any:
        alive.append(sum(weight() is not None for weight in former))
        return quantize(self, *args, **kwargs)

    monkeypatch.setattr(Quantizer, "quantize", counts)
    lpq.convert(model, "mxfp8", weights="quantized")
    assert alive == [3, 2, 1]
