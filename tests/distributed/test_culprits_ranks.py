"""Which layer did it, where ranks share the model: all of them find the same one, and all promote it; and a search in
such a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fully_shard, on_ranks
from support.small_models import Planted
from torch import Tensor, nn

import lpq
from lpq.torch_private.tensors import local_part


@pytest.mark.parametrize("weights", [None, "high_precision", "quantized"])
@on_ranks(2)
def test_ranks_of_fsdp2_find_a_planted_layer(rank: int, weights: Any) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        net: Any = nn.Sequential(*(Planted(64, i == 2) for i in range(4)))
    lpq.convert(net, "nvfp4", weights=weights, ranks=None if weights is None else 2)
    for block in net:
        fully_shard(block)
    fully_shard(net)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))

    def closure() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    torch.manual_seed(rank)
    before = lpq.observe.Before(net)
    closure()
    gradients = [local_part(p.grad).clone() for p in net.parameters() if p.grad is not None]
    found = lpq.observe.culprits(net, closure, before=before, most=1)
    assert found.replays
    assert [one.layer for one in found.found] == ["2.layer"]
    assert found.found[0].moved > 0.3
    assert {part.part for part in found.parts} >= {"fprop", "fprop.x"}
    now = [local_part(p.grad) for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(now, gradients, strict=True))
    assert net[2].layer.recipe == net[0].layer.recipe == lpq.recipe("nvfp4")
    found.promote(net, until=3)
    for step in (2, 3):
        lpq.set_step(net, step)
        assert (net[2].layer.recipe == found.found[0].recipe) == (step == 2)
        closure()


@on_ranks(2)
def test_ranks_of_fsdp2_search_as_one(rank: int) -> None:
    """The planted layer's product stays exact, and all ranks have the same errors."""
    torch.manual_seed(0)
    with torch.no_grad():
        net: Any = nn.Sequential(*(Planted(64, i == 2) for i in range(4)))
    lpq.convert(net, "fp8-current")
    for block in net:
        fully_shard(block)
    fully_shard(net)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))

    def closure() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def seconds(_: str, recipe: Any) -> float:
        return 3.0 if recipe is None else sum(1.0 if a.plain else 0.5 for a, _ in recipe.products.values())

    found = lpq.search(net, [closure, closure], recipes=["nvfp4"], time=6.5 / 12, seconds=seconds)
    exact = [(name, i) for name, one in found.choices.items() for i, text in enumerate(one.products) if text == "bf16"]
    assert exact == [("2.layer", 0)]
    error = torch.tensor([found.error, -found.error], dtype=torch.float64)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    assert error.sum() == 0
    assert 0 < found.error < found.uniform[0].error / 2
    assert net[2].layer.recipe == lpq.recipe("fp8-current")
