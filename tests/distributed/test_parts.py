"""A model that is converted in parts, by several calls: what travels is what travels of one that is converted whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from ranks import fully_shard, on_ranks
from sharded import enough, model, whole
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.optim import AdamW, Optimizer

import lpq
from lpq.observe import Collective, collectives
from lpq.optim import MasterWeights

RECIPES = ["fp8-current", "fp8-delayed", "x=mxfp8(), w=nvfp4(), dy=mxfp8()"]
Sharding = Callable[[nn.Sequential], Any]


def _whole_only(net: nn.Sequential) -> None:
    fully_shard(net)


def _each_block_and_the_whole(net: nn.Sequential) -> None:
    for module in (*net, net):
        fully_shard(module)


def _each_block(net: nn.Sequential) -> None:
    """They have no FSDP root in common."""
    for block in net:
        fully_shard(block)


def _run(
    recipe: str, weights: str, shard: Sharding, convert: Callable[..., Any]
) -> tuple[list[float], nn.Sequential, list[list[Collective]]]:
    net = model(64, 128)
    convert(net, recipe, weights)
    shard(net)
    optimizer: Optimizer = AdamW(net.parameters(), lr=1e-2)
    optimizer = MasterWeights(optimizer) if weights == "quantized" else optimizer
    losses, updates = [], []
    for number in range(enough(recipe)):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
        loss = (net(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        losses.append(loss.item())
        with collectives() as seen:
            optimizer.step()
        optimizer.zero_grad()
        updates.append(seen)
    return losses, net, updates


def _at_once(net: nn.Sequential, recipe: str, weights: Any) -> None:
    lpq.convert(net, recipe, weights=weights)


def _in_parts(net: nn.Sequential, recipe: str, weights: Any) -> None:
    lpq.convert(net[0].up, recipe, weights=weights)
    lpq.convert(net[0].down, recipe, weights=weights)
    for block in net[1:]:
        lpq.convert(block, recipe, weights=weights)


@on_ranks(2)
def test_as_converted_at_once(rank: int) -> None:
    """With every two of these that go together."""
    ways = itertools.product(RECIPES, (_whole_only, _each_block_and_the_whole, _each_block))
    for (recipe, shard), weights in zip(ways, itertools.cycle(("high_precision", "quantized"))):
        about = (recipe, weights, shard.__name__)
        losses, a, expected = _run(recipe, weights, shard, _at_once)
        found, b, seen = _run(recipe, weights, shard, _in_parts)
        assert losses == found, about
        assert len(set(losses)) == len(losses)
        assert seen == expected, about
        assert [c.kind for c in seen[-1]] == ["all_reduce"], about
        for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            assert torch.equal(whole(p.detach()), whole(q.detach())), (about, name)


@on_ranks(2)
def test_the_report_has_all_parts(rank: int) -> None:
    """By the names that they have in the whole, before and after sharding; also where more was sharded."""
    net = model(64, 128, blocks=3)
    lpq.convert(net[2], "mxfp8", weights="quantized", ranks=2)
    lpq.convert(net[0].up, "fp8-current", weights="high_precision")
    lpq.convert(net[1], {"rules": [{"match": "down", "recipe": "nvfp4"}, {"match": "left", "recipe": "mxfp8"}]})
    found = lpq.report(net)
    assert [e.name for e in found.converted] == ["0.up", "1.down", "2.up", "2.down"]
    assert [e.name for e in found.left] == ["1.up"]
    assert found.unmatched == ("left",)
    assert [e.name for e in found.weights] == ["0.up", "2.up", "2.down"]
    assert lpq.report(net[1]).converted[0].name == "down"
    fully_shard(net, reshard_after_forward=True)
    assert lpq.report(net) == found
    notes = {e.name: e.note for e in lpq.report(net[2]).weights}
    assert notes == {e.name[2:]: e.note for e in found.weights[1:]}
    lpq.convert(net, "mxfp8")  # all of it, in one call
    assert [e.name for e in lpq.report(net).converted] == [f"{i}.{name}" for i in range(3) for name in ("up", "down")]


@on_ranks(2)
def test_columns_are_said_of_a_part(rank: int) -> None:
    """Facts that FSDP2 has of the weights of a part hold in the whole."""
    net = model(64, 128)
    lpq.convert(net[0], "fp8-current", weights="high_precision")
    fully_shard(net, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    assert all("it is sharded by" in entry.note for entry in lpq.report(net[0]).weights)
    assert len(lpq.report(net[0]).weights) == 2


@on_ranks(2)
def test_two_models_of_one_optimizer(rank: int) -> None:
    nets = [lpq.convert(model(64, 128), "fp8-current", weights="high_precision") for _ in range(2)]
    for net in nets:
        fully_shard(net)
    optimizer = AdamW([p for net in nets for p in net.parameters()])
    other = AdamW(nets[1].parameters())
    for net in nets:
        net(torch.randn(32, 64)).square().mean().backward()
    for one, weights in ((optimizer, 8), (other, 4)):  # only those that it has
        with collectives() as seen:
            one.step()
        assert seen == [Collective("all_reduce", 4 * weights)]


def _reductions(net: nn.Module) -> list[Collective]:
    """Of one forward, which gathers every weight."""
    with collectives() as seen:
        net(torch.randn(32, 64))
    assert "all_gather" in {c.kind for c in seen}
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return [c for c in seen if c.kind == "all_reduce"]


@on_ranks(2)
def test_one_reduction_at_the_first_forward(rank: int) -> None:
    """Of all parts of one model, and of nothing else; whatever mixture of ways they were prepared in."""
    for shard in (_whole_only, _each_block_and_the_whole):
        net, other = model(64, 128), model(64, 128)
        for part in (*net, other):
            lpq.convert(part, "fp8-current", weights="high_precision")
        assert len({id(layer.model.fsdp) for block in net for layer in (block.up, block.down)}) == 2
        for one in (net, other):
            shard(one)
        assert _reductions(net) == [Collective("all_reduce", 4 * 4)]
        assert _reductions(net) == []
        assert other[0].up.gather.unit is None, "the other model is not touched"
        with torch.no_grad():
            for parameter in net.parameters():  # as loading a checkpoint does
                parameter.mul_(2)
        assert _reductions(net) == [Collective("all_reduce", 4 * 4)]
        assert _reductions(net) == []
        assert _reductions(other) == [Collective("all_reduce", 4 * 4)]
        with torch.no_grad():
            net[1].up.weight.mul_(2)
        assert _reductions(net) == [Collective("all_reduce", 4)], "only what was written to"
    net = model(64, 128, blocks=3)
    lpq.convert(net[0], "fp8-current", weights="quantized")
    lpq.convert(net[1].up, "fp8-current", weights="high_precision")
    lpq.convert(net[2].down, "fp8-current", weights="high_precision")
    fully_shard(net)
    assert _reductions(net) == [Collective("all_reduce", 4 * 2)]
    assert _reductions(net) == []


@on_ranks(2)
def test_parts_without_a_common_root(rank: int) -> None:
    """Each is a model of its own to FSDP2, and is measured when it is gathered."""
    net = model(64, 128)
    for block in net:
        lpq.convert(block, "fp8-current", weights="high_precision")
    _each_block(net)
    assert _reductions(net) == [Collective("all_reduce", 4 * 2)] * 2
    assert _reductions(net) == []
