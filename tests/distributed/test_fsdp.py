"""Training under FSDP2 with quantized gathers equals training with high-precision gathers, bit for bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, spawn
from sharded import How, built, enough, step, train, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lpq
from lpq.distributed.memories import Memories

RECIPES = [
    "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4", "bf16",
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
    "fprop=fp8-row, dgrad=fp8-delayed, wgrad=nvfp4",
    "fprop=bf16, dgrad=mxfp8, wgrad=fp8-current",
    "x=mxfp8(), w=hybrid(row=mxfp8, col=nvfp4, col_source=row), dy=mxfp8()",
]  # fmt: skip
KINDS = ["fp8-current", "fp8-delayed", "nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"]
"""With one scale, with state, with random bits, with other formats in other products: they train in every way. What
else there is trains in one that is not plain."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not resharded": {"reshard": False, "mixed": True, "accumulate": 2},
    "checkpointed": {
        "checkpoint": True,
        "offload": True,
        "nested": True,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    },
}
"""Each with several options that have nothing to do with each other."""


@functools.cache
def _ordinary(how: How) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of training with gathers in high precision."""
    losses, net = train(how)
    return losses, {name: whole(p) for name, p in net.named_parameters()}


def _trains_as_with_ordinary_gathers(how: How) -> None:
    """Those do without what leaves all numbers as they are: where weights are, and a backend that only traces."""
    like = replace(how, weights=None, reshard=True, checkpoint=False, offload=False, compile=False)
    ordinary, weights = _ordinary(like)
    quantized, net = train(how)
    assert ordinary == quantized, how
    for p, (name, expected) in zip(net.parameters(), weights.items(), strict=True):
        assert torch.equal(whole(p), expected), (how, name)


def _every_way(rank: int, recipe: str, ways: list[str], blocks: int = 2) -> None:
    size = {} if "block" in recipe else {"width": 128, "inner": 256}  # whole blocks for each of four ranks
    for way in ways:  # a second block is gathered while the first computes
        _trains_as_with_ordinary_gathers(How(recipe, blocks=blocks if way == "plain" else 1, **size, **WAYS[way]))


OWN = [
    "fp8-current", "nvfp4", "fp8-delayed",
    "x=fp8(scaling=delayed, history=2), w=hybrid(row=fp8(scaling=delayed, history=2), col=mxfp8), dy=mxfp8()",
]  # fmt: skip


def _on_own_data(how: How) -> tuple[list[float], nn.Sequential]:
    """Train, each rank on data of its own."""
    net = built(how)
    optimizer = how.optimizer(net.parameters())
    return [step(net, optimizer, number, how) for number in range(enough(how.recipe))], net


def _remembers_alike(net: nn.Sequential) -> None:
    """All ranks remember the largest amaxes of all."""
    for layer in net.modules():
        for memory in layer.memories().values() if isinstance(layer, lpq.nn.Linear) else ():
            same = memory.clone()
            dist.all_reduce(same, op=dist.ReduceOp.MAX)
            assert torch.equal(memory, same)


def _ranks_see_different_data(rank: int, recipe: str) -> None:
    how = How(recipe, width=128, inner=128, own_data=True)
    ordinary, a = _on_own_data(replace(how, weights=None))
    quantized, b = _on_own_data(how)
    assert ordinary == quantized
    assert all(torch.equal(whole(p), whole(q)) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert len({tuple(losses) for losses in _of_all_ranks(ordinary)}) > 1
    _remembers_alike(a)
    _remembers_alike(b)
    if "delayed" in recipe:  # what the other ranks saw makes a difference
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Memories, "reduce", lambda *_: False)
            apart, _ = _on_own_data(replace(how, weights=None))
        assert _of_all_ranks(apart) != _of_all_ranks(ordinary)


def _of_all_ranks(losses: list[float]) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    return every


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe: str) -> None:
    one = list(WAYS)[1 + RECIPES.index(recipe) % 2]
    spawn(_every_way, 2, recipe, *((list(WAYS), 2) if recipe in KINDS else ([one], 1)))


@pytest.mark.parametrize("recipe", KINDS)
@pytest.mark.parametrize(("ranks", "ways"), [(1, list(WAYS)[1:]), (4, ["plain"])])
def test_other_numbers_of_ranks(ranks: int, ways: list[str], recipe: str) -> None:
    spawn(_every_way, ranks, recipe, ways, 1)


@pytest.mark.parametrize(("ranks", "recipe"), [*((2, recipe) for recipe in OWN), (4, "fp8-delayed")])
def test_ranks_see_different_data(ranks: int, recipe: str) -> None:
    spawn(_ranks_see_different_data, ranks, recipe)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"])
@on_ranks(4)
def test_hsdp(rank: int, recipe: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _trains_as_with_ordinary_gathers(How(recipe, width=128, inner=256, blocks=1, mesh=mesh))


@on_ranks(2)
def test_compiled(rank: int) -> None:
    """On one rank; the other does the same collectives. ``test_by_inductor`` has a block that is not resharded."""
    recipe = "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"
    _trains_as_with_ordinary_gathers(How(recipe, compile=rank == 0, backend="aot_eager", checkpoint=True, blocks=1))


STORED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"offload": True, "nested": True}, {}),
    ({"mixed": True, "checkpoint": True}, {"mixed": True, "reshard": False}),
]
"""Ways of running a model whose weights are stored quantized that train alike."""


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"])
@on_ranks(2)
def test_stored_weights(rank: int, recipe: str) -> None:
    for ways in STORED:
        losses, others = (train(How(recipe, weights="quantized", ranks=2, blocks=1, **way))[0] for way in ways)
        assert losses == others, ways
        assert losses[0] != losses[1]
