"""Which layer did it: a step is replayed with parts of a model in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparing import equal
from torch import Tensor, nn

import lpq


class Block(nn.Module):
    """A block, which may have a few input channels that are a million times larger than the others. They do not count,
    as their weights are 0 and stay so: but the others share their scales."""

    def __init__(self, width: int, planted: bool) -> None:
        super().__init__()
        self.layer, self.planted = nn.Linear(width, width), planted
        if planted:
            self.layer.weight[:, ::16] = 0.0
            self.layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.planted:
            x = x.clone()
            x[:, ::16] = 1e6
        y: Tensor = self.layer(x)
        return y.tanh()


def model(recipe: str = "fp8-current", planted: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        net = nn.Sequential(*(Block(64, i == planted) for i in range(4)))
    return lpq.convert(net, recipe, **options)


def batch() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "fp8-delayed"])
def test_a_planted_layer_is_found_and_all_is_as_before(recipe: str) -> None:
    """Its product, and the operand that has the outliers. The step is replayed to the bit, though it moved states and
    drew random bits."""
    net = model(recipe)
    x = batch()
    net(x).square().mean().backward()  # so that delayed scaling has scales
    net.zero_grad()
    before = lpq.observe.Before(net)
    net(x).square().mean().backward()
    trained = [p for p in net.parameters() if p.requires_grad]
    gradients = [p.grad.clone() for p in trained]
    held = [*net.state_dict().values(), torch.get_rng_state()]
    expected = [value.clone() for value in held]

    def closure() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    found = lpq.observe.culprits(net, closure, before=before)
    assert found.replays
    assert found.found[0].layer == "2.layer"
    assert found.found[0].moved > 0.3
    assert found.found[0].moved == max(one.moved for one in found.found)
    assert "2.layer" in str(found)
    parts = {part.part: part.moved for part in found.parts if part.layer == "2.layer"}
    assert parts["fprop"] == max(parts.values())
    assert parts["fprop.x"] > parts["fprop.w"]
    assert equal([p.grad for p in trained], gradients)
    assert equal([*net.state_dict().values(), torch.get_rng_state()], expected)
    assert {m.recipe for m in net.modules() if isinstance(m, lpq.nn.Layer)} == {lpq.recipe(recipe)}
