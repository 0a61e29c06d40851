"""``lpq.restore``: a converted model becomes what it was, in place; or nothing in it is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.hugging_face import small
from support.small_models import LlamaMlp, Normed, converted, linears
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize

import lpq


def attributes(model: nn.Module) -> dict[str, tuple[type, set[str]]]:
    """The class of each module, and what it has."""
    return {name: (type(module), {*vars(module)}) for name, module in model.named_modules()}


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int = 2) -> list[float]:
    found = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_training_goes_on_with_the_same_parameters_hooks_and_optimizer() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    model = linears(64, 64, 64)
    before, layer = attributes(model), model[0]
    calls: list[str] = []
    hook = layer.register_forward_hook(lambda *_: calls.append("called"))
    lpq.convert(model, "fp8-delayed")
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, 0.01)
    losses(model, optimizer, x)
    twin = linears(64, 64, 64)
    twin.load_state_dict({key: t for key, t in model.state_dict().items() if "amax" not in key})
    theirs = torch.optim.AdamW(twin.parameters(), 0.01)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert lpq.restore(model) is model
    assert attributes(model) == before
    assert model[0] is layer
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {*model.state_dict()} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert losses(model, optimizer, x) == losses(twin, theirs, x)
    assert len(calls) == 4
    hook.remove()
    with pytest.raises(ValueError, match="the model was not converted"):
        lpq.report(model)
    assert type(lpq.convert(model, "mxfp8")[0]) is lpq.nn.Linear


@pytest.mark.parametrize("made", [LlamaMlp, Normed, lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)])
def test_fused_blocks_norms_and_fast_paths_come_back(made: Any) -> None:
    model = made()
    before, fast = attributes(model), getattr(model, "activation_relu_or_gelu", None)
    lpq.convert(model, "mxfp8", include="all", fuse=True)
    assert attributes(model) != before
    lpq.restore(model)
    assert attributes(model) == before
    assert getattr(model, "activation_relu_or_gelu", None) == fast


@pytest.mark.parametrize("name", ["Conv1D", "Mixtral"])
def test_layers_of_other_classes_come_back(name: str) -> None:
    """Layers of ``[in, out]``, and stacks of experts."""
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    from transformers.pytorch_utils import Conv1D

    model = small(name) if name == "Mixtral" else nn.Sequential(Conv1D(64, 32))
    before = attributes(model)
    lpq.convert(model, "mxfp8")
    assert attributes(model) != before
    assert attributes(lpq.restore(model)) == before


def test_a_norm_that_was_built_to_encode_hands_out_plain_rows() -> None:
    norm, linear = lpq.nn.RMSNorm(64), lpq.nn.Linear(64, 64, recipe="mxfp8")
    norm.consumers = (linear,)
    model = nn.Sequential(norm, linear)
    x = torch.randn(32, 64)
    model(x)
    lpq.restore(model)
    assert torch.equal(
        model(x), nn.functional.linear(nn.functional.rms_norm(x, (64,), norm.weight), *linear.parameters())
    )


def test_what_cannot_be_restored_is_refused_and_unchanged() -> None:
    for weights in ("quantized", "high_precision"):
        model = converted("mxfp8", 64, 64, 64, weights=weights)
        before = attributes(model)
        with pytest.raises(ValueError, match=r"0 \(Linear\) cannot be restored: its weight is not the one"):
            lpq.restore(model)
        assert attributes(model) == before
    grouped = nn.Sequential(converted("mxfp8", 64, 64), lpq.nn.GroupedLinear(2, 64, 64, recipe="mxfp8"))
    with pytest.raises(ValueError, match=r"1 \(GroupedLinear\) cannot be restored: you or a plugin built it"):
        lpq.restore(grouped)
    assert type(grouped[0][0]) is lpq.nn.Linear
    grouped[1].recipe = None
    assert type(lpq.restore(grouped)[0][0]) is nn.Linear
    model = converted("mxfp8", 64, 64, 64)
    parametrizations.weight_norm(model[1])
    for recipe in (model[1].recipe, None):
        model[1].recipe = recipe
        with pytest.raises(
            ValueError, match=r"1 \(ParametrizedLinear\) .*parametrized since: .*remove_parametrizations"
        ):
            lpq.restore(model)
        assert type(model[0]) is lpq.nn.Linear
    parametrize.remove_parametrizations(model[1], "weight")
    assert [type(layer) for layer in lpq.restore(model)] == [nn.Linear, nn.Linear]
    model = converted("mxfp8", 64, 64)
    with lpq.hold_weights(model), pytest.raises(ValueError, match=r"leave lpq\.hold_weights"):
        lpq.restore(model)


@pytest.mark.parametrize("first", ["fully_shard", "weight_norm"])
def test_the_cause_is_named_where_torch_changed_the_class_twice(first: str, mesh: DeviceMesh) -> None:
    """It was called a layer that a user or a plugin had built."""
    model = converted("mxfp8", 64, 64)
    if first == "weight_norm":
        parametrizations.weight_norm(model[0])
    fully_shard(model[0], mesh=mesh)
    if first == "fully_shard":
        parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"0 \(.*\) cannot be restored: it was parametrized since: call"):
        lpq.restore(model)


class Own(lpq.nn.Linear):
    """A layer that a user wrote."""


def test_a_layer_that_was_built_stays_though_it_is_parametrized_or_prepared() -> None:
    model = converted("mxfp8", 64, 64).append(Own(64, 64, recipe="mxfp8"))
    parametrizations.weight_norm(model[1])
    with pytest.raises(ValueError, match=r"1 \(ParametrizedOwn\) .*: you or a plugin built it: with `recipe = None`"):
        lpq.restore(model)
    model[1].recipe = None
    assert [type(layer).__name__ for layer in lpq.restore(model)] == ["Linear", "ParametrizedOwn"]
    prepared = lpq.convert(nn.Sequential(Own(64, 64, recipe="mxfp8")), "mxfp8", weights="high_precision")
    with pytest.raises(ValueError, match=r"0 \(Own\) .*: you or a plugin built it: with `recipe = None`"):
        lpq.restore(prepared)
    prepared[0].recipe = None
    assert type(lpq.restore(prepared)[0]) is Own
