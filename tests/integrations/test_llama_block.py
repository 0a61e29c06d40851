"""Count the operands that a block of Hugging Face's Llama encodes, and the bytes it keeps for backward."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llama import llama
from support.comparing import equal
from torch import Tensor

import lpq
from lpq.nn.linear import Layer
from lpq.nn.siblings import SharedInputs

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from counting import encodings, kept_for_backward

TOKENS = 32
IDS = torch.randint(0, 64, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))


def made(recipe: str, apart: bool, **options: Any) -> Any:
    model = lpq.convert(llama(), recipe, **options)
    for module in model.modules() if apart else ():
        if isinstance(module, Layer):
            module.join(replace(module.model, inputs=SharedInputs()))
    return model


def step(model: Any) -> tuple[Tensor, int, list[Tensor]]:
    """The result, the bytes kept for backward, and the gradients."""
    torch.manual_seed(3)  # of stochastic rounding
    y, kept = kept_for_backward(lambda: model(input_ids=IDS, use_cache=False).logits)
    y.square().mean().backward()
    return y.detach(), kept, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("weights", [None, "high_precision", "quantized"])
def test_four_inputs_are_encoded_for_seven_layers(recipe: str, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = encodings(monkeypatch)
    found = []
    for apart in (False, True):
        model = made(recipe, apart, weights=weights, ranks=1 if weights else None)
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False)
        of_x = [w for w in seen if w.shape[0] == TOKENS]
        of_w = len(seen) - len(of_x)
        assert len(of_x) == (7 if apart else 4)
        assert of_w == (0 if weights == "quantized" else 7)
        seen.clear()
        found.append(step(model))
        assert len([w for w in seen if w.shape[0] == TOKENS]) == (7 if apart else 4) + 7  # those of dy
        seen.clear()
    (y, together, gradients), (z, apart_, others) = found
    assert torch.equal(y, z)
    assert equal(gradients, others)
    col = lpq.recipe(recipe).x.quantize(torch.randn(TOKENS, 64)).col
    assert col is not None
    assert apart_ - together == 3 * sum(t.untyped_storage().nbytes() for t in col.tensors())
