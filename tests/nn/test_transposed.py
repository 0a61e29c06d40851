"""Hugging Face's Conv1D, whose weight is [in, out]: converted, it is what the same nn.Linear is, to the bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import Parameter
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import lpq
from lpq.nn import Layer

TOKENS = torch.arange(32).view(2, 16)
SHAPE: dict[str, Any] = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
ALIKE: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
PARTS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SHAPE, **ALIKE))


def with_linears(model: nn.Module) -> nn.Module:
    """The same model with an nn.Linear in place of each Conv1D."""
    for name, old in list(model.named_modules()):
        if type(old) is Conv1D:
            new = nn.Linear(old.nx, old.nf)
            new.weight, new.bias = Parameter(old.weight.detach().t().contiguous()), old.bias
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
    return model


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Three losses of a model that is trained."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed", "x=mxfp8, w=fp8(scaling=row), dy=fp8(dtype=e5m2)"])
def test_it_trains_as_the_same_linear_layers_do(recipe: str) -> None:
    model, twin = gpt2(), with_linears(gpt2())
    names = [f"transformer.h.{i}.{part}" for i in range(2) for part in PARTS]
    keys, shapes = list(model.state_dict()), [p.shape for p in model.parameters()]
    parameters = [id(p) for p in model.parameters()]
    lpq.convert(model, recipe)
    lpq.convert(twin, recipe)
    assert [e.name for e in lpq.report(model).converted if e.kind == "Conv1D"] == names
    assert [id(p) for p in model.parameters()] == parameters
    assert [p.shape for p in model.parameters()] == shapes
    assert [key for key in model.state_dict() if "_amax" not in key] == keys
    losses = trained(model)
    assert all(map(torch.equal, losses, trained(twin)))
    assert not torch.equal(losses[0], trained(gpt2())[0]), "which is none of low precision"
    for name in names:
        assert torch.equal(model.get_submodule(name).weight, twin.get_submodule(name).weight.t())
    loaded = lpq.convert(gpt2(), recipe)
    loaded.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    expected = model(TOKENS).logits
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(0)
        assert torch.equal(other(TOKENS).logits, expected)


def conv(recipe: Any = "mxfp8", **how: Any) -> Any:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(Conv1D(96, 64), nn.Linear(96, 64)), recipe, **how)


def test_it_stays_what_others_know() -> None:
    layer = conv()[0]
    assert isinstance(layer, Conv1D)
    assert isinstance(layer, Layer)
    assert not isinstance(layer, nn.Linear), "others would take its weight for [out, in]"
    with pytest.raises(ValueError, match=r"^layer 0, Conv1D\(64, 96\): the input is \[2, 3\], .* must be 64"):
        layer(torch.ones(2, 3))


def test_it_follows_a_policy_and_high_precision_is_its_own() -> None:
    x = torch.randn(4, 64)
    rules = [{"match": "*", "recipe": "skip", "until": 2}, {"match": "*", "recipe": "mxfp8"}]
    model, plain = conv({"rules": rules}), nn.Sequential(Conv1D(96, 64), nn.Linear(96, 64))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))
    lpq.set_step(model, 2)
    assert torch.equal(model(x), conv()(x))
    assert not torch.equal(model(x), plain(x))
    layer = Conv1D(96, 64)
    layer.forward = layer.forward  # type: ignore[method-assign]
    left = lpq.report(lpq.convert(nn.Sequential(layer, nn.Linear(96, 64)), "mxfp8")).left
    assert [e.note for e in left] == ["its forward was replaced on the object"]


def test_what_it_does_in_another_way_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"accumulate='grad' is for weights of \[out, in\], and the weight of 0 \(Conv1D\)"
    ):
        conv(accumulate="grad")
    for weights in ("high_precision", "quantized"):
        model = conv(weights=weights)
        notes = {e.name: e.note for e in lpq.report(model).weights}
        assert notes["0"].startswith("in high precision: the weight is [in, out]")
        assert notes["1"].endswith("in backward")
        x = torch.randn(4, 64)
        assert torch.equal(model(x), conv()(x))


def test_it_may_be_held_and_compiled() -> None:
    model, x = conv("nvfp4"), torch.randn(16, 64)
    torch.manual_seed(1)
    expected = model(x)
    expected.sum().backward()
    gradient, model[0].weight.grad = model[0].weight.grad, None
    with lpq.hold_weights(model):
        torch.manual_seed(1)
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(model[0].weight.grad, gradient)
    model[0].weight.grad = None
    torch.manual_seed(1)
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert torch.equal(y, expected)
    assert model[0].weight.grad.shape == (64, 96)
