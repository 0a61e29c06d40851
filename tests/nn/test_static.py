"""Static quantizers: layers encode with what calibration found, in training and in evaluation, in any format."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.comparing import equal
from torch import Tensor, nn

import lpq
from lpq import registry
from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.nn import Linear
from lpq.operations import gemm
from lpq.operations.quantizing import quantize
from lpq.recipes import RecipeError
from lpq.registry import FormatSpec, hookimpl

RECIPES = [
    "x=fp8(static=true), w=fp8(static=true), dy=fp8(dtype=e5m2)",
    "x=nvfp4(rht=true, static=true), w=nvfp4(block=16x16, static=true), dy=nvfp4(rht=true)",
    "fprop=nvfp4(static=true), dgrad=mxfp8, wgrad=mxfp8",
    "x=thirds(static=true), w=thirds(static=true), dy=thirds",
]
VALUE = {"x": 3.0, "w": 0.25}


class ThirdsStorage(Storage):
    """A third party's format: numbers of 8 bits and one step for all."""

    layout = (Buffer("data", torch.int8), Buffer("step", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.step  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ThirdsQuantizer(Quantizer):
    """It declares the option, and nothing else about being static."""

    static: bool = False
    stats = (Stat("largest"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"largest": x.float().abs().amax()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        step = torch.where(stats["largest"] > 0, stats["largest"] / 127, 1.0)
        return ThirdsStorage(data=(x.float() / step).round().clamp(-127, 127).to(torch.int8), step=step)


@hookimpl
def lpq_register_formats() -> FormatSpec:
    here = __name__
    return FormatSpec(
        name="thirds", summary="a test's", quantizer=f"{here}:ThirdsQuantizer", storage=f"{here}:ThirdsStorage",
        effective_bits=8,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def thirds(monkeypatch: pytest.MonkeyPatch) -> Any:
    registry.register(sys.modules[__name__], name="thirds")
    yield
    registry.refresh()


def filled(layer: Linear) -> Linear:
    for name, buffer in layer.static_values().items():
        buffer.fill_(VALUE[name[0]])
    layer.passes.forget()
    return layer


def layer_of(recipe: str) -> Linear:
    torch.manual_seed(0)
    return filled(Linear(64, 48, bias=False, recipe=recipe))


def operand(quantizer: Quantizer, tensor: Tensor, value: float) -> Storage:
    """The row operand by the static statistic, and measured ones for blocks."""
    side = replace(quantizer.side("row"), static=False)  # type: ignore[type-var]
    stats = [torch.tensor(value) if stat.of_all else None for stat in side.stats]
    made = quantize(tensor.detach(), stats, side, None)[0]
    assert made is not None
    return made


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_multiplies_by_static_statistics_and_no_step_moves_them(recipe: str) -> None:
    """Whatever goes through; control: the same recipe without the option computes something else."""
    layer = layer_of(recipe)
    assert layer.recipe is not None
    before = {name: value.clone() for name, value in layer.static_values().items()}
    assert before
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    dynamic = Linear(64, 48, bias=False, recipe=recipe.replace(", static=true", "").replace("static=true", ""))
    dynamic.load_state_dict(layer.state_dict())
    for scale in (1.0, 10.0):
        given = (x * scale).requires_grad_()
        y = layer(given)
        w = operand(layer.recipe.w, layer.weight, VALUE["w"])
        assert torch.equal(y.detach(), gemm(operand(layer.recipe.x, given, VALUE["x"]), w))
        assert not torch.equal(y, dynamic(given))
        y.sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.isfinite().all()
        with torch.no_grad():
            assert torch.equal(layer.eval()(given), y)
        layer.train()
    assert all(torch.equal(value, before[name]) for name, value in layer.static_values().items())


def test_a_tensor_that_is_kept_has_its_column_operand_made_in_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward has nothing to measure. The gradients are those of a layer that keeps operands."""
    recipe, encode = RECIPES[3], ThirdsQuantizer.encode
    made: list[int] = []
    layer, usual = layer_of(f"{recipe}, x.save=input, w.save=weight"), layer_of(recipe)
    monkeypatch.setattr(ThirdsQuantizer, "encode", lambda *how: made.append(1) or encode(*how))  # type: ignore[func-returns-value]
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    counts, gradients = [], []
    for one in (layer, usual):
        given = x.clone().requires_grad_()
        y = one(given)
        counts.append(len(made))
        y.square().sum().backward()
        counts.append(len(made))
        gradients.append((given.grad, one.weight.grad))
        made.clear()
    assert counts == [2, 6, 4, 6]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_static_values_stay_fp32_and_are_saved(recipe: str) -> None:
    layer = layer_of(recipe)
    exact = torch.tensor(1 / 3)
    for value in layer.static_values().values():
        value.copy_(exact)
    for moved in (copy.deepcopy(layer).half(), copy.deepcopy(layer).to(torch.bfloat16), copy.deepcopy(layer).double()):
        assert moved.weight.dtype != torch.float32
        for value in moved.static_values().values():
            assert value.dtype == torch.float32
            assert torch.equal(value, exact)
    again = Linear(64, 48, bias=False, recipe=recipe).bfloat16()
    again.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
    assert all(torch.equal(value, exact) for value in again.static_values().values())


def test_a_static_recipe_without_values_is_refused_by_name() -> None:
    """At the first pass, and after loading what has none."""
    model = lpq.convert(nn.Sequential(nn.Linear(64, 48, bias=False)), RECIPES[0])
    with pytest.raises(RuntimeError, match=r"layer 0, .*static, and x_amax is 0\.0: fill it by lpq\.calibrate"):
        model(torch.randn(4, 64))
    filled(model[0])
    model(torch.randn(4, 64))
    model.load_state_dict({"0.weight": torch.randn(48, 64)})
    with pytest.raises(RuntimeError, match="x_amax is 0"):
        model(torch.randn(4, 64))


def test_a_weight_that_is_stored_quantized_has_no_static_scale() -> None:
    with pytest.raises(RecipeError, match="0: its weight would be stored quantized with a static scale"):
        lpq.convert(nn.Sequential(nn.Linear(64, 48)), RECIPES[0], weights="quantized")


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_compiled_layers_compute_the_same(recipe: str) -> None:
    layer = layer_of(recipe)
    x = torch.randn(32, 64, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, compiled):
        x.grad = layer.weight.grad = None
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is not None
        results.append((y.detach(), x.grad.clone(), layer.weight.grad.clone()))
    assert equal(*results)


def test_a_plan_measures_nothing_that_is_static(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the option the same layer measures its input and its weight."""
    seen: list[str] = []
    measure = ThirdsQuantizer.measure
    monkeypatch.setattr(ThirdsQuantizer, "measure", lambda self, x: seen.append(self.text) or measure(self, x))
    layer = layer_of(RECIPES[3])
    with torch.no_grad():
        layer(torch.randn(32, 64))
        assert seen == []
        layer.recipe = "thirds"
        layer(torch.randn(32, 64))
    assert seen
