"""The memory of layers across steps: which buffers there are, and where."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lpq


def layer(recipe: str, fan_in: int = 48, fan_out: int = 32) -> lpq.nn.Linear:
    torch.manual_seed(3)
    return lpq.nn.Linear(fan_in, fan_out, recipe=recipe)


def test_delayed_scaling_resumes_bitwise() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(layer("fp8-delayed"), nn.ReLU(), layer("fp8-delayed", 32, 16))

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 48, generator=generator) * (1 + step)
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters())
    train(whole, optimizer, range(3))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    assert {"0.weight", "0.bias", "0.x_amax_history", "0.w_amax_history", "0.dy_amax_history"} <= set(saved[0])
    train(whole, optimizer, range(3, 6))
    resumed = model()
    resumed.load_state_dict(saved[0])
    optimizer = torch.optim.AdamW(resumed.parameters())
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, range(3, 6))
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )
    forgetful = model()
    forgetful.load_state_dict({k: v for k, v in saved[0].items() if "amax" not in k})
    optimizer = torch.optim.AdamW(forgetful.parameters())
    optimizer.load_state_dict(saved[1])
    train(forgetful, optimizer, range(3, 6))
    assert not torch.equal(whole[0].weight, forgetful[0].weight)  # the history matters


def test_the_history_moves_in_backward_only() -> None:
    module = layer("fp8-delayed")
    x = torch.randn(8, 48)
    with torch.no_grad():
        module(x)
    y = module(x)
    assert all(not b.any() for b in module.buffers())
    y.sum().backward()
    assert module.x_amax_history[0] == x.abs().max()
    assert module.w_amax_history[0] == module.weight.abs().max()
    assert module.dy_amax_history[0] == 1


def test_buffers_of_the_user_are_nobodys_memory() -> None:
    """Names alone do not make a buffer one that a quantizer remembers in."""
    module = layer("fp8-delayed")
    module.register_buffer("x_mean", torch.ones(3))
    module(torch.randn(8, 48)).sum().backward()
    assert set(module.memories()) == {f"{t}_{key}" for t in ("x", "w", "dy") for key in ("amax_history", "amax")}
    module.load_state_dict({"weight": module.weight.detach(), "bias": module.bias.detach()}, strict=False)
    assert torch.equal(module.x_mean, torch.ones(3)), "it is not started afresh"
    module.recipe = "mxfp8"
    assert torch.equal(module.x_mean, torch.ones(3))
    assert "x_amax_history" not in dict(module.named_buffers())
    module.register_buffer("dy_amax", torch.ones(()))
    with pytest.raises(ValueError, match=r"fp8-delayed remembers dy_amax, and the layer has an attribute of that name"):
        module.recipe = "fp8-delayed"
    assert module.recipe.title == "mxfp8"
    assert module(torch.randn(8, 48)).isfinite().all()


def test_a_layer_of_meta_remembers_where_its_weight_is_put() -> None:
    """From a checkpoint without that entry, too."""
    with torch.device("meta"):
        module = layer("fp8-delayed")
    module.load_state_dict(nn.Linear(48, 32).state_dict(), assign=True)
    assert all(memory.device.type == "cpu" and not memory.any() for memory in module.memories().values())
    x = torch.randn(8, 48)
    module(x).sum().backward()
    assert module.x_amax_history[0] == x.abs().max()


@pytest.mark.parametrize(
    "policy",
    [
        "fp8-delayed",
        {"rules": [{"match": "*", "recipe": "mxfp8", "until": 2}, {"match": "*", "recipe": "fp8-delayed"}]},
    ],
)
def test_a_name_that_is_taken_is_refused_before_anything_is_changed(policy: Any) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    net[1].register_buffer("x_amax", torch.ones(()))
    with pytest.raises(ValueError, match=r"^1: fp8-delayed remembers x_amax, and the layer has an attribute of that"):
        lpq.convert(net, policy)
    assert {type(layer) for layer in net} == {nn.Linear}
    del net[1].x_amax
    lpq.convert(lpq.convert(net, policy), policy)  # what the layers remember themselves is no such attribute
