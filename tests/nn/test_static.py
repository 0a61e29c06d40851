"""Static quantizers: layers encode with what calibration found, in training and in evaluation, in any format."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.comparing import equal
from support.passes import compiled, step
from support.plugins import FormatPlugin
from support.small_models import converted
from torch import Tensor

from lpq import registry
from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.operations import gemm
from lpq.operations.quantizing import quantize
from lpq.recipes import RecipeError

RECIPES = [
    "x=fp8(static=true), w=fp8(static=true), dy=fp8(dtype=e5m2)",
    "x=nvfp4(rht=true, static=true), w=nvfp4(block=16x16, static=true), dy=nvfp4(rht=true)",
    "fprop=nvfp4(static=true), dgrad=mxfp8, wgrad=mxfp8",
    "x=thirds(static=true), w=thirds(static=true), dy=thirds",
]
VALUE = {"x": 3.0, "w": 0.25}
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


class ThirdsStorage(Storage):
    """A third party's format: numbers of 8 bits and one step for all."""

    layout = (Buffer("data", torch.int8), Buffer("step", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.step


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


@pytest.fixture(autouse=True)
def thirds() -> Iterator[None]:
    registry.register(FormatPlugin("thirds", ThirdsQuantizer, ThirdsStorage), name="thirds")
    yield
    registry.refresh()


def filled(layer: Any) -> Any:
    for name, buffer in layer.static_values().items():
        buffer.fill_(VALUE[name[0]])
    layer.passes.forget()
    return layer


def layer_of(recipe: str, fill: bool = True) -> Any:
    layer = converted(recipe, 64, 48, bias=False)[0]
    return filled(layer) if fill else layer


def operand(quantizer: Quantizer, tensor: Tensor, value: float) -> Storage | None:
    """The row operand by the static statistic, and measured ones for blocks."""
    side = replace(quantizer.side("row"), static=False)
    stats = [torch.tensor(value) if stat.of_all else None for stat in side.stats]
    return quantize(tensor.detach(), stats, side, None)[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_multiplies_by_static_statistics_and_no_step_moves_them(recipe: str) -> None:
    """Whatever goes through; control: the same recipe without the option computes something else."""
    layer = layer_of(recipe)
    before = {name: value.clone() for name, value in layer.static_values().items()}
    assert before
    dynamic = layer_of(recipe.replace(", static=true", "").replace("static=true", ""))
    for scale in (1.0, 10.0):
        y, _, dw, *_ = step(layer, given := X * scale)
        w = operand(layer.recipe.w, layer.weight, VALUE["w"])
        assert torch.equal(y, gemm(operand(layer.recipe.x, given, VALUE["x"]), w))
        assert not torch.equal(y, dynamic(given))
        assert dw.isfinite().all()
        with torch.no_grad():
            assert torch.equal(layer.eval()(given), y)
        layer.train()
    assert all(torch.equal(value, before[name]) for name, value in layer.static_values().items())


def test_a_tensor_that_is_kept_has_its_column_operand_made_in_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward has nothing to measure. The gradients are those of a layer that keeps operands."""
    made: list[int] = []
    encode = ThirdsQuantizer.encode
    monkeypatch.setattr(ThirdsQuantizer, "encode", lambda *how: made.append(1) or encode(*how))
    counts, found = [], []
    for recipe in (f"{RECIPES[3]}, x.save=input, w.save=weight", RECIPES[3]):
        made.clear()
        found.append(step(layer_of(recipe), X, lambda m, x: (m(x), counts.append(len(made)))[0])[:3])
        counts.append(len(made))
    assert counts == [2, 6, 4, 6]
    assert equal(*found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_static_values_stay_fp32_and_are_saved(recipe: str) -> None:
    layer, exact = layer_of(recipe), torch.tensor(1 / 3)
    for value in layer.static_values().values():
        value.copy_(exact)
    again = layer_of(recipe, fill=False).bfloat16()
    again.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for moved in (copy.deepcopy(layer).to(dtype), again):
            assert moved.weight.dtype != torch.float32
            assert all(value.dtype == torch.float32 for value in moved.static_values().values())
            assert all(torch.equal(value, exact) for value in moved.static_values().values())


def test_a_static_recipe_without_values_is_refused_by_name() -> None:
    """At the first pass, and after loading what has none."""
    layer = layer_of(RECIPES[0], fill=False)
    with pytest.raises(RuntimeError, match=r"layer 0, .*static, and x_amax is 0\.0: fill it by lpq\.calibrate"):
        layer(X)
    filled(layer)(X)
    layer.load_state_dict({"weight": torch.randn(48, 64)})
    with pytest.raises(RuntimeError, match="x_amax is 0"):
        layer(X)


def test_a_weight_that_is_stored_quantized_has_no_static_scale() -> None:
    with pytest.raises(RecipeError, match="0: its weight would be stored quantized with a static scale"):
        converted(RECIPES[0], 64, 48, weights="quantized")


def test_compiled_layers_compute_the_same() -> None:
    layer = layer_of(RECIPES[1])
    assert equal(step(layer, X), step(layer, X, compiled))


def test_a_plan_measures_nothing_that_is_static(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the option the same layer measures its input and its weight."""
    seen: list[str] = []
    measure = ThirdsQuantizer.measure
    monkeypatch.setattr(ThirdsQuantizer, "measure", lambda self, x: seen.append(self.text) or measure(self, x))
    layer = layer_of(RECIPES[3])
    with torch.no_grad():
        layer(X)
        assert seen == []
        layer.recipe = "thirds"
        layer(X)
    assert seen
