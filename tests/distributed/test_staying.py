"""Weights that stay gathered after backward for the next micro-batch: ``set_reshard_after_backward(False)``."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import on_ranks
from sharded import How, batch, built, whole
from support.comparing import equal
from torch import Tensor
from torch.optim import AdamW

from lpq.optim import MasterWeights

RECIPES = ["fp8-current", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"]


def _train(how: How, stay: bool) -> tuple[list[float], list[Tensor]]:
    net = built(how)
    optimizer: Any = AdamW(net.parameters(), lr=1e-2, fused=True)
    optimizer = MasterWeights(optimizer, keep=False) if how.weights == "quantized" else optimizer
    losses = []
    for number in range(2):
        for micro in range(2):
            last = micro == 1
            net.set_requires_gradient_sync(last)  # type: ignore[operator]
            net.set_reshard_after_backward(last or not stay)  # type: ignore[operator]
            x = batch(number, how, micro)
            loss = (net(x) - x.roll(1, 0)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [whole(p.detach()) for p in net.parameters()]


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
@on_ranks(2)
def test_weights_that_stay_gathered(rank: int, weights: str) -> None:
    for recipe in RECIPES:
        how = How(recipe, weights=weights, width=64, inner=128)
        losses, values = _train(how, stay=True)
        expected, others = _train(how, stay=False)
        assert losses == expected, recipe
        assert len(set(losses)) == 4
        assert equal(values, others), recipe
