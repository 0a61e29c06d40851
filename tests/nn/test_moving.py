"""Prepared weights that other code refers to: torch cannot exchange them, and that is said in words."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lpq


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_a_weight_that_cannot_be_moved_is_named(weights: Any) -> None:
    model = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", weights=weights)
    held = weakref.ref(model[0].weight)
    with pytest.raises(
        RuntimeError, match=r"layer 0, .* cannot be moved or cast, .* DeepSpeed.* weights=None.*weakref"
    ):
        model.to(torch.bfloat16)
    del held
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
