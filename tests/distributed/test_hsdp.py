"""HSDP, 2x2: statistics are reduced over the ranks that share a weight out; replicas agree without being asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operands import read, watched
from ranks import on_ranks
from sharded import How, built, enough
from support.comparing import copy_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed import alike, attach
from lpq.operations import reduce_statistics
from lpq.optim import MasterWeights

DELAYED = "fp8-delayed"
WIDTH = 64
RECIPES = ["fp8-current", DELAYED, "nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"]
Bytes = dict[str, Tensor]


@contextmanager
def _reductions() -> Iterator[list[tuple[int, ...]]]:
    """The ranks over which each MAX runs; gradients are summed."""
    seen: list[tuple[int, ...]] = []
    cast, compare, reduce = dist.all_reduce, alike.all_reduce, reduce_statistics.reduce_max

    def casts(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.MAX:
            seen.append(tuple(dist.get_process_group_ranks(group)))
        return cast(tensor, op, group, async_op)

    def compares(tensor: Tensor, operation: str, group: str) -> Tensor:
        seen.append(tuple(dist.get_process_group_ranks(_resolve_process_group(group))))
        return compare(tensor, operation, group)

    def reduces(values: Sequence[Tensor], group: Any, **how: Any) -> list[Tensor]:
        if values:
            seen.append(tuple(dist.get_process_group_ranks(group)))
        return reduce(values, group, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", casts)
        patch.setattr(alike, "all_reduce", compares)
        patch.setattr(reduce_statistics, "reduce_max", reduces)
        yield seen


def _local_bytes(net: nn.Module) -> Bytes:
    """The bytes of all that this rank holds: shards, and what layers remember."""
    found: Bytes = {}
    for name, tensor in net.state_dict().items():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(local, QuantizedTensor):
            for direction, storage in local.operands:
                for buffer, values in storage.buffers().items():
                    found[f"{name}.{direction}.{buffer}"] = copy_bytes(values)
        else:
            found[name] = copy_bytes(getattr(local, "held", local))
    return found


def _agree(here: Bytes, group: Any) -> bool:
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, here, group=group)
    return all(one.keys() == here.keys() and all(torch.equal(one[k], here[k]) for k in here) for one in every)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Bytes:
    """One step, on data of this rank's own; the bytes of what was gathered on the way."""
    seen: Bytes = {}

    def sees(name: str, when: str, weight: Tensor) -> None:
        assert isinstance(weight, QuantizedTensor)
        operand = read(weight, "row" if when == "forward" else "col")
        seen.update({f"{name}.{when}.{buffer}": values for buffer, values in operand.items()})

    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
    with watched(net, sees):
        net(x.requires_grad_()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return seen


def _trained(rank: int, mesh: DeviceMesh, recipe: str, weights: str, masters: bool) -> None:
    stored = weights == "quantized"
    net = built(How(recipe, weights=weights, width=WIDTH, inner=2 * WIDTH, mesh=mesh, offload=stored))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = MasterWeights(optimizer, keep=masters) if stored else optimizer
    replicas, shards = mesh.get_group("replicate"), mesh.get_group("shard")
    before = _local_bytes(net)
    for step in range(enough(recipe)):
        with _reductions() as seen:
            bytes_here = _step(net, optimizer, 10 * step + rank)
        everywhere, among = tuple(range(4)), tuple(dist.get_process_group_ranks(shards))
        between = tuple(dist.get_process_group_ranks(replicas))
        assert len(among) == len(between) == 2
        assert everywhere not in seen
        if step and masters and recipe != DELAYED:
            assert seen == [among] * (recipe != "mxfp8"), (recipe, seen)
        if recipe == DELAYED:  # its layers saw other inputs on other replicas, too
            assert between in seen
        else:
            assert set(seen) == {among}, (recipe, weights, seen)
        assert len(bytes_here) >= 16
        assert _agree(bytes_here, None), (recipe, weights)  # what was gathered is the same on all four
        here = _local_bytes(net)
        assert _agree(here, replicas), (recipe, weights)
        assert not _agree(here, shards)  # or this comparison says nothing
    after = _local_bytes(net)
    moved = [k for k in before if "weight" in k and not torch.equal(before[k], after[k])]
    assert len(moved) >= 6


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(4)
def test_replicas_agree(rank: int, recipe: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _trained(rank, mesh, recipe, "high_precision", masters=False)
    _trained(rank, mesh, recipe, "quantized", masters=RECIPES.index(recipe) % 2 == 0)


@on_ranks(2)
def test_replicas_that_would_part_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net = nn.Sequential(nn.Linear(64, 64, bias=False))
    lpq.convert(net, "x=mxfp8(), w=nvfp4(stochastic=true), dy=mxfp8()", weights="quantized", ranks=1)
    fully_shard(net, mesh=mesh)
    with pytest.raises(ValueError, match=r"^0\.weight: .* its 2 replicas would be rounded with different random bits"):
        attach(net[0].weight)
