"""The memory of layers across steps: which buffers there are, and where."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.comparing import equal, equal_states
from support.small_models import converted, linears
from torch import nn

import lpq


def layer() -> Any:
    return converted("fp8-delayed", 48, 32)[0]


def test_delayed_scaling_resumes_bitwise() -> None:
    """Control: without the histories it trains on otherwise."""

    def trained(steps: range, saved: Any = None, without: str = "nothing") -> tuple[Any, Any]:
        model = converted("fp8-delayed", 48, 32, 16, between=nn.ReLU)
        optimizer = torch.optim.AdamW(model.parameters())
        if saved is not None:
            model.load_state_dict({k: v for k, v in saved[0].items() if without not in k})
            optimizer.load_state_dict(saved[1])
        for step in steps:
            x = torch.randn(16, 48, generator=torch.Generator().manual_seed(step)) * (1 + step)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    saved, whole = trained(range(3)), trained(range(6))[0]
    assert {"0.weight", "0.bias", "0.x_amax_history", "0.w_amax_history", "0.dy_amax_history"} <= set(saved[0])
    assert equal_states(trained(range(3, 6), saved)[0], whole)
    assert not torch.equal(trained(range(3, 6), saved, without="amax")[0]["0.weight"], whole["0.weight"])


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4-eden-delayed"])
def test_a_state_that_was_cast_is_fp32_again_whichever_way_it_is_loaded(recipe: str) -> None:
    """``assign=True`` made it bf16, and so were scales and what was remembered."""
    net, x = converted(recipe, 48, 32), torch.randn(16, 48).bfloat16()
    net(x.float()).square().sum().backward()
    cast, found = {key: value.bfloat16() for key, value in net.state_dict().items()}, []
    for assign in (False, True):
        module = converted(recipe, 48, 32, dtype=torch.bfloat16)
        module.load_state_dict(cast, assign=assign)
        torch.manual_seed(0)
        y = module(x * 3)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in module.parameters()), *module.buffers()])
    assert equal(*found)
    assert {b.dtype for b in module.buffers()} == {torch.float32}


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_that_is_loaded_before_backward_is_moved_by_it(assign: bool) -> None:
    """``assign=True`` put other tensors in the place of the state, and the pass moved the tensors before these."""
    module, x = layer(), torch.randn(8, 48)
    saved = {key: torch.full_like(value, 3.0) if "amax" in key else value for key, value in module.state_dict().items()}
    y = module(x)
    module.load_state_dict(saved, assign=assign)
    y.sum().backward()
    assert module.x_amax_history[:2].tolist() == [x.abs().max().item(), 3.0]
    assert all(bool((saved[name] == 3.0).all()) for name in module.memories()), "the state dict stays as it is"


def test_the_history_moves_in_backward_only() -> None:
    module, x = layer(), torch.randn(8, 48)
    with torch.no_grad():
        module(x)
    y = module(x)
    assert all(not b.any() for b in module.buffers())
    y.sum().backward()
    assert module.x_amax_history[0] == x.abs().max()
    assert module.w_amax_history[0] == module.weight.abs().max()
    assert module.dy_amax_history[0] == 1


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4-eden-delayed"])
def test_a_recipe_that_is_given_under_inference_mode_trains_afterwards(recipe: str) -> None:
    """As by ``lpq.set_step`` in an evaluation: its states could not be moved, and backward failed."""
    changed, x = converted("mxfp8", 48, 32)[0], torch.randn(16, 48)
    with torch.inference_mode():
        changed.recipe = recipe
        changed(x)
    assert not any(memory.is_inference() for memory in changed.buffers())
    for module in (changed, plain := converted(recipe, 48, 32)[0]):
        torch.manual_seed(0)
        module(x).square().sum().backward()
    assert equal_states(changed.state_dict(), plain.state_dict())
    assert torch.equal(changed.weight.grad, plain.weight.grad)


def test_buffers_of_the_user_are_nobodys_memory() -> None:
    """Names alone do not make a buffer one that a quantizer remembers in."""
    module = layer()
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
        module = lpq.nn.Linear(48, 32, recipe="fp8-delayed")
    module.load_state_dict(nn.Linear(48, 32).state_dict(), assign=True)
    assert all(memory.device.type == "cpu" and not memory.any() for memory in module.memories().values())
    x = torch.randn(8, 48)
    module(x).sum().backward()
    assert module.x_amax_history[0] == x.abs().max()


LATER = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 2}, {"match": "*", "recipe": "fp8-delayed"}]}


@pytest.mark.parametrize("policy", ["fp8-delayed", LATER])
def test_a_name_that_is_taken_is_refused_before_anything_is_changed(policy: Any) -> None:
    net: Any = linears(64, 64, 64, 64)
    net[1].register_buffer("x_amax", torch.ones(()))
    with pytest.raises(ValueError, match=r"^1: fp8-delayed remembers x_amax, and the layer has an attribute of that"):
        lpq.convert(net, policy)
    assert {type(layer) for layer in net} == {nn.Linear}
    del net[1].x_amax
    lpq.convert(lpq.convert(net, policy), policy)  # what the layers remember themselves is no such attribute
