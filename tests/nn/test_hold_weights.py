"""lpq.hold_weights: which weights may be held, and what is refused of one that is changed meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpq


def layer(recipe: str) -> lpq.nn.Linear:
    torch.manual_seed(3)
    return lpq.nn.Linear(64, 32, recipe=recipe)


def test_a_stored_weight_whose_format_remembers_is_held() -> None:
    module, x = layer("fp8-delayed"), torch.randn(4, 64)
    module.weight = nn.Parameter(module.recipe.w.quantize(module.weight.detach()))
    module(x)
    expected = module(x)
    with lpq.hold_weights(module):
        y = module(x)
        y.sum().backward()
    assert torch.equal(y, expected)
    assert not module.w_amax_history.any()  # nothing was measured of it
