"""Transforms of torch.func do not pass through a layer with a recipe, and the layer says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import lpq


def test_transforms_of_torch_func_are_refused_in_words() -> None:
    model, x = lpq.convert(nn.Sequential(nn.Linear(48, 32)), "mxfp8"), torch.randn(3, 48)
    params = dict(model.named_parameters())

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, params, (x,)).square().sum()

    transforms: list[Callable[[], Any]] = [
        lambda: grad(loss)(params), lambda: vmap(model)(x[None]), lambda: jvp(model, (x,), (x,)),
        lambda: jacrev(model)(x), lambda: vmap(lambda row: model(row[None]))(x),
    ]  # fmt: skip
    words = r"^layer 0, lpq\.nn\.Linear\(48, 32\): torch\.func's transforms .* torch\.autograd, .*layer\.recipe = None"
    for recipe in ("mxfp8", "bf16"):
        model[0].recipe = recipe
        for transform in transforms:
            with pytest.raises(RuntimeError, match=words):
                transform()
        value = loss(params)  # by itself, functional_call is no transform
        assert torch.equal(value, model(x).square().sum())
        gradients = torch.autograd.grad(value, list(params.values()))
        assert all(torch.equal(g, p.grad) for g, p in zip(gradients, _trained(model, x), strict=True))
    model[0].recipe = None
    for transform in transforms:
        transform()


@pytest.mark.parametrize("stored", [None, "quantized"])
def test_many_gradients_at_once_are_refused_in_words(stored: Any) -> None:
    experts = lpq.convert(lpq.nn.GroupedLinear(2, 48, 32, recipe=None), "mxfp8", weights=stored)
    model, x = lpq.convert(nn.Linear(48, 32), "mxfp8", weights=stored), torch.randn(32, 48, requires_grad=True)
    for layer in (model, lambda x: experts(x, [16, 16])):
        y = layer(x)
        dy = torch.randn(3, *y.shape)
        with pytest.raises(RuntimeError, match=r"is_grads_batched=True .*one gradient at a time"):
            torch.autograd.grad(y, x, dy, is_grads_batched=True)
        with pytest.raises(RuntimeError, match=r"vectorize=True.*one gradient at a time"):
            torch.autograd.functional.jacobian(layer, x, vectorize=True)
        assert torch.autograd.grad(y, x, dy[0])[0].any()


def test_a_trace_by_torch_jit_is_refused_in_words() -> None:
    """It would record what kernels return, and not that they ran; also where a pass of this kind ran before."""

    class Experts(lpq.nn.GroupedLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x, [16, 16])

    model, x = lpq.convert(nn.Sequential(nn.Linear(48, 32)), "mxfp8"), torch.randn(32, 48)
    for layer in (model, Experts(2, 48, 32, recipe="mxfp8")):
        y = layer(x)
        with pytest.raises(RuntimeError, match=r"Linear.*torch\.jit\.trace records neither .*torch\.export"):
            torch.jit.trace(layer, (x,), check_trace=False)
        assert torch.equal(layer(x), y)
    model[0].recipe = None
    assert torch.equal(torch.jit.trace(model, (x,))(x[:3]), model(x[:3]))


def _trained(model: nn.Module, x: torch.Tensor) -> list[nn.Parameter]:
    model.zero_grad()
    model(x).square().sum().backward()
    return list(model.parameters())
