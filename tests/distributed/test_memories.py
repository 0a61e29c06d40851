"""Delayed scaling on several ranks: after a step all remember the largest of what each has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fully_shard, spawn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import lpq
from lpq.observe.collectives import collectives


def _net(tied: bool = False, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32))
    if tied:
        net[2].weight = net[0].weight
    return lpq.convert(net, "fp8-delayed", **how)


def _agree(net: nn.Module) -> bool:
    mine = [buffer for name, buffer in net.named_buffers() if "history" in name]
    assert mine
    assert all(buffer.any() for buffer in mine)
    found: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    largest = [torch.stack(each).amax(0) for each in zip(*found, strict=True)]
    return all(torch.equal(a, b) for own in found for a, b in zip(own, largest, strict=True))


def _replicated(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, broadcast_buffers=False)


def _hybrid(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))  # type: ignore[no-any-return]


def _frozen(net: nn.Module) -> nn.Module:
    """As the layers beside adapters are."""
    net[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    return fully_shard(net)  # type: ignore[no-any-return]


def _tied(net: nn.Module) -> nn.Module:
    """A weight of two layers is not gathered quantized."""
    return fully_shard(net)  # type: ignore[no-any-return]


def _after_each_step(rank: int, weights: Any, prepare: Callable[[nn.Module], nn.Module]) -> None:
    net = prepare(_net(prepare is _tied, weights=weights))
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for number in range(3):
        for _ in range(2):  # micro-batches
            x = torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * number + rank)).requires_grad_()
            net(x).square().mean().backward()
        assert not _agree(net)
        with collectives() as seen:
            optimizer.step()
        assert len(seen) <= 3 + (number == 0) * 4, "few, however many layers there are"
        optimizer.zero_grad()
        assert _agree(net)


@pytest.mark.parametrize(
    ("weights", "prepare"),
    [
        (None, fully_shard), (None, _frozen), (None, _replicated),
        ("high_precision", fully_shard), ("high_precision", _frozen), ("high_precision", _tied),
    ],
)  # fmt: skip
def test_ranks_remember_the_same_after_each_step(weights: Any, prepare: Callable[[nn.Module], nn.Module]) -> None:
    spawn(_after_each_step, 2, weights, prepare)


def test_replicas_of_shards_do_so_too() -> None:
    spawn(_after_each_step, 4, None, _hybrid)
