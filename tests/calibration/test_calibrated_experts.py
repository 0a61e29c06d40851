"""Experts in stacks: calibrated as separate layers are, in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import data, statics
from support.comparing import equal_states
from support.hugging_face import small
from support.small_models import experts_apart
from torch import Tensor, nn

import lpq
from lpq.calibration import CalibrationError, CalibrationWarning, layer_noise
from lpq.nn import GroupedLinear
from lpq.nn.stateful_layer import StatefulLayer
from lpq.observe import Observed, observing

COUNT, WIDTH, INNER = 4, 64, 48
LEAVES = ("w1", "w3", "w2")


class Stacks(nn.Module):
    """Three stacks; to the last expert goes nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1, self.w3 = (GroupedLinear(COUNT, WIDTH, INNER, recipe=None) for _ in range(2))
        self.w2 = GroupedLinear(COUNT, INNER, WIDTH, bias=False, recipe=None)
        with torch.no_grad():
            self.w3.weight[1, 5, 7] = 0.75

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        y: Tensor = self.w2(nn.functional.silu(self.w1(rows, counts)) * self.w3(rows, counts), counts)
        return y


class Layers(nn.ModuleList):
    """The same experts as layers."""

    def __init__(self) -> None:
        super().__init__(experts_apart(Stacks()))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts: list[Tensor] = []
        for e, x in zip(self, rows.split(counts), strict=True):
            if len(x):
                parts.append(e.w2(nn.functional.silu(e.w1(x)) * e.w3(x)))
        return torch.cat(parts)


class Model(nn.Module):
    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        third = len(rows) // 3
        y: Tensor = self.experts(rows, [third, len(rows) - 2 * third, third, 0])
        return y


@pytest.mark.parametrize(
    ("recipe", "method"),
    [("fp8-current", "percentile"), ("x=nvfp4(rht=true), w=nvfp4(block=16x16), dy=nvfp4(rht=true)", "four_over_six")],
)
def test_experts_in_stacks_are_calibrated_as_separate_layers(recipe: str, method: Any) -> None:
    """The same scales, codes, outputs and gradients; an expert without tokens is named. Control: dynamic ones."""
    made = []
    for experts in (Stacks, Layers):
        model: Any = lpq.convert(Model(experts), recipe)
        with pytest.warns(
            CalibrationWarning, match=r"no token went through experts\.3\.w1, experts\.3\.w3, experts\.3"
        ):
            made.append((model, lpq.calibrate(model, data(4), method=method)))
    (stacks, found), (layers, expected) = made
    assert equal_states(dict(found.values), dict(expected.values))
    assert {*found.layers} == {*expected.layers} == {f"experts.{i}.{leaf}" for i in range(COUNT) for leaf in LEAVES}
    assert found.left == expected.left == ()
    assert equal_states(*(dict(lpq.export.stream(model, "compressed-tensors")) for model in (stacks, layers)))
    key = "w_amax"
    assert found.values[f"experts.1.w1.{key}"] == found.values[f"experts.1.w3.{key}"] == 0.75
    assert found.values[f"experts.0.w1.{key}"] < 0.5, "of each expert its own"
    x = data(1)[0] * 2
    y = stacks(x)
    assert torch.equal(y, layers(x))
    y.square().sum().backward()
    layers(x).square().sum().backward()
    for leaf in LEAVES:
        grads = [getattr(e, leaf).weight.grad for e in layers.experts]
        stack = getattr(stacks.experts, leaf).weight.grad
        assert all(torch.equal(stack[i], grads[i]) for i in range(COUNT - 1))
        assert not stack[COUNT - 1].any()
    dynamic = lpq.convert(Model(Stacks), recipe)
    assert not torch.equal(dynamic(x), y)
    noise = layer_noise(stacks, data(1))
    assert {one.layer for one in noise} == {f"experts.{leaf}" for leaf in LEAVES}
    assert all(5 < one.output < 60 and 5 < one.weight < 60 for one in noise)
    with pytest.raises(CalibrationError, match=r"experts\.3\.w1 saw no input but zeros"):
        lpq.calibrate(dynamic, data(1), unseen="error")


@pytest.mark.parametrize("name", ["GroupedLinear", "Mixtral"])
def test_a_batch_that_fails_leaves_no_measurement_of_noise_behind(name: str) -> None:
    if name == "Mixtral":
        model = lpq.convert(small(name), "fp8-current")
    else:
        model = lpq.convert(Model(Stacks), "fp8-current")

    def fail(model: nn.Module, batch: object) -> None:
        raise ValueError("no forward")

    with pytest.raises(ValueError, match="no forward"):
        layer_noise(model, [0], forward=fail)
    assert not any(m.passes.observers for m in model.modules() if isinstance(m, StatefulLayer))


def test_static_stacks_stay_fp32_and_are_saved_copied_and_refused_when_empty() -> None:
    model = lpq.convert(Model(Stacks), "fp8-current")
    with pytest.warns(CalibrationWarning):
        lpq.calibrate(model, data(2))
    found = statics(model)
    assert found["experts.w1.x_amax"].shape == (COUNT,)
    for moved in (copy.deepcopy(model).half(), copy.deepcopy(model).to(torch.bfloat16)):
        assert equal_states(statics(moved), found)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    again = lpq.convert(Model(Stacks), model.__dict__["lpq_conversion"].policy)
    with pytest.raises(RuntimeError, match=r"layer experts\.w1, .*is static, and x_amax is \[0\.0, 0\.0, 0\.0, 0\.0\]"):
        again(data(1)[0])
    again.load_state_dict(state)
    assert torch.equal(again(data(1)[0]), model(data(1)[0]))


def test_a_stack_that_is_stored_quantized_keeps_its_codes() -> None:
    model: Any = lpq.convert(Model(Stacks), "fp8-current", weights="quantized")
    codes = model.experts.w1.weight.row.data.clone().view(torch.uint8)
    with pytest.warns(CalibrationWarning):
        lpq.calibrate(model, data(2))
    assert torch.equal(model.experts.w1.weight.row.data.view(torch.uint8), codes)
    assert list(model.experts.w1.static_values()) == ["x_amax"]
    model(data(1)[0]).sum().backward()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_of_hugging_face_models(name: str) -> None:
    """Each expert's matrices have the scales of what they are given, and are separate static layers to the bit."""
    model = lpq.convert(small(name), "fp8-current")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    tokens = [torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    given: dict[tuple[str, int], list[Tensor]] = {}

    class Note:
        def observe(self, seen: Observed) -> None:
            for part in seen.groups() if seen.name == "x" else ():
                assert part.group is not None
                given.setdefault((part.stack, part.group), []).append(part.value.flatten())

    with torch.no_grad(), observing(experts, Note()):
        for batch in tokens:
            model.eval()(batch)
    seen = {key: torch.cat(rows).abs().amax() for key, rows in given.items()}
    done = lpq.calibrate(model, tokens)
    assert len(seen) == 2 * COUNT
    for (stack, i), amax in seen.items():
        path = f"model.layers.0.mlp.experts.{i}.{stack}"
        assert done.values[f"{path}.x_amax"] == amax == getattr(experts, f"{stack}_x_amax")[i]
        assert done.values[f"{path}.w_amax"] == getattr(experts, stack)[i].abs().amax()
    kept = {name: value.clone() for name, value in experts.static_values().items()}
    assert len(kept) == 4
    x, ends = torch.randn(12, 64) * 3, torch.tensor([3, 6, 9, 12], dtype=torch.int32)
    y = experts.multiply("gate_up_proj", x, ends)
    weight = experts.gate_up_proj[2]
    weight = weight.t() if experts.is_transposed else weight
    one = lpq.nn.Linear(*weight.t().shape, bias=experts.has_bias, recipe=experts.recipe)
    one.weight = nn.Parameter(weight.detach().clone())
    if one.bias is not None:
        one.bias = nn.Parameter(experts.gate_up_proj_bias[2].detach().clone())
    for key, value in one.static_values().items():
        value.copy_(kept[f"gate_up_proj_{key}"][2])
    assert torch.equal(y[6:9], one(x[6:9]))
    model.train()(tokens[0]).logits.square().sum().backward()
    half = copy.deepcopy(model).to(torch.bfloat16).get_submodule("model.layers.0.mlp.experts")
    assert equal_states({name: getattr(half, name) for name in kept}, kept)
    again = lpq.convert(small(name), model.__dict__["lpq_conversion"].policy)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens[0]).logits, model.eval()(tokens[0]).logits)
