"""On a GPU too backward adds the gradient of a weight in place: what comes out is the sum of the separate gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq

RECIPES = ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "nvfp4"]
STEPS = 3


def _model(recipe: str, **how: Any) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 256))
    return lpq.convert(layers.to("cuda", torch.bfloat16), recipe, **how)


def _backward(model: Any, number: int) -> None:
    """Compute the gradients of one micro-batch."""
    torch.manual_seed(number)
    model(torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()


def _weights(model: Any) -> list[Any]:
    return [model[0].weight, model[2].weight]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sum_in_grad(recipe: str) -> None:
    model, single = _model(recipe, accumulate="grad"), _model(recipe)
    sums: list[Tensor] = []
    for number in range(STEPS):
        _backward(model, number)
        _backward(single, number)
        parts = [weight.grad for weight in _weights(single)]
        sums = [so_far + part for so_far, part in zip(sums, parts, strict=True)] if sums else parts
        single.zero_grad()
        for weight, expected in zip(_weights(model), sums, strict=True):
            assert expected.any()
            assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sum_in_main_grad(recipe: str) -> None:
    model, single = _model(recipe, accumulate="main_grad"), _model(recipe, accumulate="main_grad")
    for weight in _weights(model) + _weights(single):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    held, sums = [weight.main_grad for weight in _weights(model)], [0.0, 0.0]
    for number in range(STEPS):
        _backward(model, number)
        _backward(single, number)
        for i, (weight, alone) in enumerate(zip(_weights(model), _weights(single), strict=True)):
            sums[i] = sums[i] + alone.main_grad
            assert alone.main_grad.any()
            alone.main_grad.zero_()
            assert weight.main_grad is held[i], "it is added to in place"
            assert torch.equal(held[i], sums[i])
            assert weight.grad is None
