"""HSDP, 2x2: statistics are reduced over the ranks that share a weight out; replicas agree without being asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operands import read, watched
from ranks import mesh_of, of_all, on_ranks
from sharded import SMALL, How, built, bytes_of, enough, optimizer_for
from support.comparing import equal_states
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import fully_shard

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed import alike, attach
from lpq.operations import reduce_statistics

DELAYED = "fp8-delayed"
RECIPES = ["fp8-current", DELAYED, "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"]
Bytes = dict[str, Tensor]


@contextmanager
def _reductions() -> Iterator[list[tuple[int, ...]]]:
    """The ranks over which each MAX runs; gradients are summed."""
    seen: list[tuple[int, ...]] = []
    cast, compare, reduce = dist.all_reduce, alike.all_reduce, reduce_statistics.reduce_max

    def note(group: Any) -> None:
        seen.append(tuple(dist.get_process_group_ranks(group)))

    def casts(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.MAX:
            note(group)
        return cast(tensor, op, group, async_op)

    def compares(tensor: Tensor, operation: str, group: str) -> Tensor:
        note(_resolve_process_group(group))
        return compare(tensor, operation, group)

    def reduces(values: Sequence[Tensor], group: Any, **how: Any) -> list[Tensor]:
        if values:
            note(group)
        return reduce(values, group, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", casts)
        patch.setattr(alike, "all_reduce", compares)
        patch.setattr(reduce_statistics, "reduce_max", reduces)
        yield seen


def _agree(here: Bytes, group: Any = None) -> bool:
    return all(equal_states(one, here) for one in of_all(here, group))


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Bytes:
    """One step, on data of this rank's own; the bytes of what was gathered on the way."""
    seen: Bytes = {}

    def sees(name: str, when: str, weight: Tensor) -> None:
        assert isinstance(weight, QuantizedTensor)
        operand = read(weight, "row" if when == "forward" else "col")
        seen.update({f"{name}.{when}.{buffer}": values for buffer, values in operand.items()})

    x = torch.randn(32, SMALL["width"], generator=torch.Generator().manual_seed(seed))
    with watched(net, sees):
        net(x.requires_grad_()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("recipe", "weights"),
    [(RECIPES[0], "quantized"), (DELAYED, "high_precision"), (DELAYED, "quantized"), (RECIPES[2], "high_precision")],
)
@on_ranks(4)
def test_replicas_agree(rank: int, recipe: str, weights: str) -> None:
    mesh, stored = mesh_of("replicate", "shard"), weights == "quantized"
    masters = stored and RECIPES.index(recipe) % 2 == 0
    net = built(how := How(recipe, weights=weights, mesh=mesh, offload=stored, masters=masters, **SMALL))
    optimizer = optimizer_for(how, net)
    replicas, shards = mesh.get_group("replicate"), mesh.get_group("shard")
    between, among = (tuple(dist.get_process_group_ranks(group)) for group in (replicas, shards))
    assert len(among) == len(between) == 2
    before = bytes_of(net)
    for step in range(enough(recipe)):
        with _reductions() as seen:
            gathered = _step(net, optimizer, 10 * step + rank)
        assert tuple(range(4)) not in seen
        if step and masters and recipe != DELAYED:
            assert seen == [among], (recipe, seen)
        if recipe == DELAYED:  # its layers saw other inputs on other replicas, too
            assert between in seen
        else:
            assert set(seen) == {among}, (recipe, weights, seen)
        assert len(gathered) >= 16
        assert _agree(gathered), (recipe, weights)  # what was gathered is the same on all four
        here = bytes_of(net)
        assert _agree(here, replicas), (recipe, weights)
        assert not _agree(here, shards)  # or this comparison says nothing
    assert sum("weight" in name and not torch.equal(before[name], here[name]) for name in before) >= 6


@on_ranks(2)
def test_replicas_that_would_part_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net = nn.Sequential(nn.Linear(64, 64, bias=False))
    lpq.convert(net, "x=mxfp8(), w=nvfp4(stochastic=true), dy=mxfp8()", weights="quantized", ranks=1)
    fully_shard(net, mesh=mesh)
    with pytest.raises(ValueError, match=r"^0\.weight: .* its 2 replicas would be rounded with different random bits"):
        attach(net[0].weight)
