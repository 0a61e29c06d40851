"""Layers, plugins and models that are not as usual: each is converted rightly, left alone with a reason, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hugging_face import small
from support.small_models import converted, linears
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import utils
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

import lpq

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "computed", [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), utils.weight_norm, utils.spectral_norm]
)
def test_a_weight_that_is_computed_stays_in_high_precision(
    computed: Callable[[nn.Linear], object], weights: Any
) -> None:
    def made() -> nn.Sequential:
        model = linears(64, 64, 64)
        computed(model[0])
        return model

    keys = list(made().state_dict())
    expected = lpq.convert(made(), "mxfp8")[0](X)
    model = lpq.convert(made(), "mxfp8", weights=weights)
    notes = {entry.name: entry.note for entry in lpq.report(model).weights}
    assert notes["0"] == "in high precision: the weight is no parameter but computed from others, as by pruning"
    assert "mxfp8" in notes["1"]
    assert list(model.state_dict()) == keys
    assert torch.equal(model[0](X), expected)
    model(X).square().mean().backward()
    assert all(p.grad is not None for p in model[0].parameters())


class Counted(nn.Module):
    """A parametrization that counts how often a weight is computed: in a shard that takes a collective."""

    times = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.times += 1
        return weight * 1

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


@pytest.mark.parametrize("weights", ["high_precision", None])
def test_a_weight_is_computed_by_passes_alone(weights: Any) -> None:
    """A report of one rank waited for the others, and a first pass took two steps of a spectral norm."""
    model = lpq.convert(linears(64, 64, 64), "mxfp8", weights=weights)
    counted = Counted()
    nn.utils.parametrize.register_parametrization(model[0], "weight", counted, unsafe=True)
    counted.times = 0
    model(X).sum().backward()
    assert counted.times == 1
    assert "converted" in str(lpq.report(model))
    lpq.observe.memory(model, 2)
    assert counted.times == 1


def test_a_forward_that_was_replaced_on_the_object_is_left_alone() -> None:
    """It would go on as it was, whatever the class of the layer."""
    model = linears(64, 64, 64)
    before = model[0].forward
    model[0].forward = lambda x: before(x)
    lpq.convert(model, "nvfp4")
    report = lpq.report(model)
    assert [entry.name for entry in report.converted] == ["1"]
    assert [(e.name, e.note) for e in report.left] == [("0", "its forward was replaced on the object")]
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_forward_that_was_replaced_on_the_class_is_left_alone(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a wrapper that has the name and the module of what it wraps."""
    forward = functools.wraps(kind.forward)(lambda self, x: 0 * x)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", forward)
        model = lpq.convert(nn.Sequential(kind(64, 64)), "nvfp4", include="all")
        assert type(model[0]) is kind
        assert model(X).count_nonzero() == 0
        (left,) = lpq.report(model).left
    assert left.note == "its forward was replaced on the class"
    assert lpq.report(lpq.convert(model, "nvfp4")).converted


class Encoded(Tensor):
    """A class of tensors that another library encodes, as torchao's."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


def test_a_weight_that_another_library_encoded_is_left_alone() -> None:
    model = linears(64, 64, 64)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Encoded))  # type: ignore[arg-type]
    (left,) = lpq.report(lpq.convert(model, "nvfp4")).left
    assert left.name == "0"
    assert left.note == f"another library encoded its weight: {__name__}.Encoded"
    assert type(model[0].weight) is Encoded
    assert isinstance(model[1], lpq.nn.Linear)
    with pytest.warns(UserWarning, match="left every layer as it was: 0: another library encoded its weight"):
        lpq.convert(model[:1], "nvfp4", weights="quantized")


@pytest.mark.parametrize("where", ["object", "class"])
def test_experts_with_another_forward_are_left_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("Mixtral")
    name, experts = next((n, m) for n, m in model.named_modules() if n.endswith("experts"))
    monkeypatch.setattr(experts if where == "object" else type(experts), "forward", lambda *args: args[-3])
    report = lpq.report(lpq.convert(model, "mxfp8"))
    (left,) = (entry for entry in report.left if entry.name == name)
    assert left.note == f"its forward was replaced on the {where}"
    assert report.converted, "other layers"


def test_the_report_tells_what_is_not_there_any_more() -> None:
    model = converted("nvfp4", 64, 64, 64, 64)
    model[0] = nn.Linear(64, 64)
    del model[2]
    assert [(entry.name, entry.note) for entry in lpq.report(model).converted] == [
        ("0", "nvfp4; since then replaced by an ordinary nn.Linear"),
        ("1", "nvfp4"),
        ("2", "nvfp4; since then taken out of the model"),
    ]


def test_policies_name_layers_as_if_nothing_wrapped_them() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    policy = {"rules": [{"match": "1", "recipe": "skip"}, {"match": "[03]", "recipe": "mxfp8"}]}
    net = nn.Sequential(nn.Linear(64, 64), checkpoint_wrapper(nn.Linear(64, 64)), checkpoint_wrapper(nn.GELU()))
    report = lpq.report(lpq.convert(torch.compile(net, backend="eager"), policy))
    assert [entry.name for entry in report.converted] == ["0"]
    assert report.unmatched == ()


def test_what_another_recipe_remembers_of_more_steps_is_dropped(tmp_path: Any) -> None:
    def net(history: int) -> nn.Module:
        return converted(f"x=fp8(scaling=delayed, history={history}), w=fp8(), dy=fp8()", 64, 64)

    long, short = net(8), net(4)
    for model in (long, short):
        model(X).sum().backward()
    state = dict(long.state_dict())
    short.load_state_dict(state)
    assert "0.x_amax_history" in state
    assert torch.equal(short[0].weight, long[0].weight)
    assert not short[0].x_amax_history.any()
    short(X).sum().backward()
    lpq.checkpoint.load(short, lpq.checkpoint.save(long, tmp_path), any_policy=True)
    assert not short[0].x_amax_history.any()


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_a_weight_that_is_parametrized_and_sharded_is_not_prepared(weights: Any, mesh: DeviceMesh) -> None:
    """Its parametrization computes a DTensor, as the layer sees it."""
    model = converted("mxfp8", 64, 64)
    utils.parametrizations.weight_norm(model[0])
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="0: its weight is sharded already; call"):
        lpq.convert(model, "mxfp8", weights=weights)


@pytest.mark.filterwarnings("ignore:lpq.convert")  # of weights= that have nothing to prepare
@pytest.mark.parametrize("weights", [None, "high_precision", "quantized"])
def test_a_weight_that_a_parametrization_computes_is_not_computed_to_look_at_it(weights: Any) -> None:
    """Under spectral norm each computation in training moves its vectors. Control: a pass moves them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 64))
    lpq.convert(model, "mxfp8", include="all")
    for layer in model:
        nn.utils.parametrizations.spectral_norm(layer)
    before = [buffer.clone() for buffer in model.buffers()]
    policy = {"rules": [{"match": "2", "recipe": "nvfp4", "until": 3}, {"match": "*", "recipe": "mxfp8"}]}
    lpq.convert(model, policy, weights=weights)
    lpq.replan(model, steps=8)
    assert [layer.recipe and layer.recipe.name for layer in model] == ["mxfp8", None, "nvfp4"]
    assert all(torch.equal(*pair) for pair in zip(before, model.buffers(), strict=True))
    model[0](torch.randn(4, 64))
    assert not all(torch.equal(*pair) for pair in zip(before, model.buffers(), strict=True))


def test_a_weight_that_a_parametrization_computes_in_float64_is_refused() -> None:
    model: Any = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", include="all")
    nn.utils.parametrizations.spectral_norm(model[0])
    model.double()
    with pytest.raises(TypeError, match=r"0: its weight is torch\.float64"):
        lpq.convert(model, "nvfp4")
