"""A step that makes stored weights NaN says which, once each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_models import converted
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lpq.optim import MasterWeights

OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    lambda params: MasterWeights(AdamW(params, lr=1e-2, fused=True), keep=False),
    lambda params: MasterWeights(SGD(params, lr=0.1, foreach=False), keep=False),
    lambda params: MasterWeights(AdamW(params, lr=1e-2)),
]


def _net(recipe: str) -> nn.Module:
    return converted(recipe, *[64] * 7, weights="quantized")


def _step(net: nn.Module, optimizer: Optimizer, spoiled: dict[int, float]) -> list[str]:
    """Return the warnings of one step in which weights get a gradient with one number that is not finite."""
    for i, layer in enumerate(net):
        layer.weight.grad = torch.full((64, 64), 0.01)
        if i in spoiled:
            layer.weight.grad[17, 23] = spoiled[i]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(w.message) for w in said]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-current"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_what_is_not_finite_is_said_once(recipe: str, make: Callable[[Any], Optimizer]) -> None:
    net = _net(recipe)
    optimizer = make(net.parameters())
    begun = _step(net, optimizer, {})
    assert len(begun) == optimizer.keep
    assert all(said.startswith("masters begin with what weights decode to") for said in begun)
    (said,) = _step(net, optimizer, {1: torch.nan, 4: torch.inf})
    assert "made weights NaN or infinite that are stored quantized: 1.weight, 4.weight. The gradients" in said
    assert [bool(layer.weight.dequantize().isfinite().all()) for layer in net] == [i not in (1, 4) for i in range(6)]
    assert _step(net, optimizer, {}) == []
    (said,) = _step(net, optimizer, dict.fromkeys(range(6), torch.nan))
    assert "0.weight, 2.weight, 3.weight and 1 more. " in said
    assert _step(net, optimizer, dict.fromkeys(range(6), torch.nan)) == []
