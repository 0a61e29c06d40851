"""Training under FSDP2 with quantized gathers equals training with high-precision gathers, and training of weights that
are stored quantized equals training of the unsharded model, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import mesh_of, of_all, on_one, on_ranks
from sharded import OPTIMIZERS, STORED, W8, How, built, local, parts, same_parts, stored, train, trained, whole
from support.comparing import equal, equal_states
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed.memories import Memories
from lpq.optim import MasterWeights
from lpq.tensor.encode_writes import overwrite

THREE = "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"
RECIPES = [
    "fp8-current", "fp8-delayed", "fp8-block", "nvfp4", THREE,
    "fprop=fp8-row, dgrad=fp8-delayed, wgrad=nvfp4",
    "fprop=bf16, dgrad=mxfp8, wgrad=fp8-current",
    "x=mxfp8(), w=hybrid(row=mxfp8, col=nvfp4, col_source=row), dy=mxfp8()", "nvfp4-eden",
]  # fmt: skip
KINDS = ["fp8-current", "fp8-delayed", "nvfp4", THREE, "nvfp4-eden"]
"""With one scale, with state, with random bits, with other formats in other products, with a column operand that each
pass makes: they train in every way. The others train in one that is not plain."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"blocks": 2},  # the second is gathered while the first computes
    "not resharded": {"reshard": False, "mixed": True, "accumulate": 2},
    "checkpointed": {"checkpoint": True, "offload": True, "nested": True, "optimizer": OPTIMIZERS["fused"]},
    "staying": {"accumulate": 2, "stays": True},
}
"""Each with several options that have nothing to do with each other."""


@functools.cache
def _ordinary(how: How) -> tuple[list[float], list[Tensor]]:
    """The losses and the weights of training with gathers in high precision."""
    losses, net = train(how)
    return losses, [whole(p) for p in net.parameters()]


def _as_with_ordinary_gathers(how: How) -> None:
    """Those do without what leaves all numbers as they are: where weights are, and a backend that only traces."""
    ways = {"reshard": True, "checkpoint": False, "offload": False, "compile": False, "stays": False}
    ordinary, weights = _ordinary(replace(how, weights=None, **ways))  # type: ignore[arg-type]
    losses, net = train(how)
    assert ordinary == losses, how
    assert equal(weights, map(whole, net.parameters())), how


def _every_way(recipe: str, ways: Iterable[str], **options: Any) -> None:
    size = {} if "block" in recipe else {"width": 128, "inner": 256}  # whole blocks for each of four ranks
    for way in ways:
        _as_with_ordinary_gathers(How(recipe, **{"blocks": 1, **size, **WAYS[way], **options}))


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_every_recipe(rank: int, recipe: str) -> None:
    ways = [*WAYS] if recipe in KINDS else [[*WAYS][1 + RECIPES.index(recipe) % 2]]
    _every_way(recipe, ways[:-1] if recipe == "fp8-delayed" else ways)  # what stays is encoded as it was recalled


@on_ranks(2)
def test_named_recipes(rank: int) -> None:
    """Those that no other test trains: each in one way."""
    for i, recipe in enumerate(sorted({*lpq.registry.recipes()} - {*RECIPES, "bf16"})):
        _every_way(recipe, [[*WAYS][i % 2]], blocks=1)


@pytest.mark.parametrize(("ranks", "recipe"), [(1, "fp8-current"), (1, "fp8-delayed"), (4, "nvfp4"), (4, THREE)])
@on_ranks()
def test_other_numbers_of_ranks(rank: int, ranks: int, recipe: str) -> None:
    _every_way(recipe, list(WAYS)[1:3] if ranks == 1 else ["plain"])


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
@on_ranks(4)
def test_hsdp(rank: int, recipe: str) -> None:
    """``test_hsdp`` has what replicas have in common."""
    _every_way(recipe, ["plain"], blocks=1, mesh=mesh_of("replicate", "shard"))


@pytest.mark.parametrize("recipe", [THREE, "nvfp4-eden"])
@on_ranks(2)
def test_compiled(rank: int, recipe: str) -> None:
    """On one rank; the other does the same collectives. ``test_by_inductor`` has a block that is not resharded."""
    _as_with_ordinary_gathers(How(recipe, compile=rank == 0, backend="aot_eager", checkpoint=True, blocks=1))


@on_ranks(2)
def test_a_column_operand_that_a_pass_draws_does_not_travel(rank: int) -> None:
    """The row operand does, in each direction; the column operand would be as many bytes again where both stay."""
    for reshard in (True, False):
        net = built(How("nvfp4-eden", reshard=reshard, blocks=1))
        notes = {entry.note.split(": ", 1)[1] for entry in lpq.report(net).weights}
        assert notes == {
            "0.28 of bf16 in forward, 0.28 in backward" if reshard else "0.28 of bf16, once for forward and backward"
        }
        net(torch.ones(4, net[0].up.in_features)).sum().backward()
        assert all(layer.gather.operands.col is None for layer in (net[0].up, net[0].down))


OF_W = "fp8(scaling=delayed, history=2)"
OWN = [(2, "fp8-current"), (2, f"x={OF_W}, w=hybrid(row={OF_W}, col=mxfp8), dy={OF_W}"), (4, "fp8-delayed")]


@pytest.mark.parametrize(("ranks", "recipe"), OWN)
@on_ranks()
def test_ranks_see_different_data(rank: int, ranks: int, recipe: str) -> None:
    how = How(recipe, width=128, inner=128, own_data=True)
    (losses, a), (others, b) = train(replace(how, weights=None)), train(how)
    assert losses == others
    assert equal(map(whole, a.parameters()), map(whole, b.parameters()))
    everywhere = of_all(losses)
    assert len(set(map(tuple, everywhere))) > 1
    for net in (a, b):  # all ranks remember the largest amaxes of all
        for memory in (
            m for layer in net.modules() if isinstance(layer, lpq.nn.Linear) for m in layer.memories().values()
        ):
            largest = memory.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            assert torch.equal(memory, largest)
    if "delayed" in recipe:  # what the other ranks saw makes a difference
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Memories, "reduce", lambda *_: False)
            assert of_all(train(replace(how, weights=None))[0]) != everywhere


# ---------------------------------------------------------------------------------- weights that are stored quantized


class Mixed(nn.Sequential):
    """The meaning of ``MixedPrecisionPolicy``: a model in fp32, and one in bf16 which computes in its place."""

    def __init__(self, net: nn.Sequential, how: How) -> None:
        super().__init__(*net)
        self._in_bf16 = [built(replace(how, mixed=False, bf16=True))]  # not a part of it
        for own, other in self._both():
            other.register_post_accumulate_grad_hook(lambda other, own=own: self._take_gradient(own, other))

    def _both(self) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.parameters(), self._in_bf16[0].parameters(), strict=True)

    @staticmethod
    def _take_gradient(own: Tensor, other: Tensor) -> None:
        assert other.grad is not None
        own.grad, other.grad = other.grad.float(), None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in self._both():
                if isinstance(own, QuantizedTensor):
                    assert isinstance(other, QuantizedTensor)
                    overwrite(other, own.row, own.col)
                else:
                    other.copy_(own)
        computed = self._in_bf16[0](x)
        assert computed.dtype == torch.bfloat16
        return computed


class Alone(NamedTuple):
    """The results of training unsharded: the losses, the parameters and the masters."""

    losses: list[float]
    parameters: nn.ParameterList
    masters: list[Tensor]


@functools.cache
def _alone(how: How) -> Alone:
    return on_one(_trained_alone, how)


def _masters(optimizer: torch.optim.Optimizer, how: How) -> list[Tensor]:
    assert isinstance(optimizer, MasterWeights)
    return [whole(master) for master in optimizer.masters.values()] if how.masters else []


def _trained_alone(how: How) -> Alone:
    net = built(how)
    before = [parts(p) for p in net.parameters()]
    losses, _, optimizer = trained(how, net=Mixed(net, how) if how.mixed else net)
    assert not any(equal_states(a, parts(b)) for a, b in zip(before, net.parameters(), strict=True))
    return Alone(
        losses, nn.ParameterList(nn.Parameter(p.detach(), False) for p in net.parameters()), _masters(optimizer, how)
    )


def _as_unsharded(how: How) -> list[float]:
    expected = _alone(replace(how, shard=False, checkpoint=False, reshard=True, offload=False, stays=False))
    losses, net, optimizer = trained(how)
    assert losses == expected.losses, how
    assert sum(isinstance(local(p), QuantizedTensor) for p in net.parameters()) == 2 * how.blocks
    same_parts(net, expected.parameters, how)
    masters = _masters(optimizer, how)
    assert len(masters) == 2 * how.blocks * how.masters
    assert equal(masters, expected.masters), how
    return losses


HYBRID = W8.format("hybrid(row=nvfp4, col=fp8(scaling=row))")


@on_ranks(2)
def test_every_optimizer(rank: int) -> None:
    """With masters; ``test_steps`` has each without."""
    for name, make in OPTIMIZERS.items():
        _as_unsharded(stored(HYBRID, optimizer=make, masters=True, scheduled=name != "foreach", blocks=1))
    plain = _as_unsharded(stored("fp8-current", masters=True))
    assert _as_unsharded(stored("fp8-current", masters=True, scheduled=True)) != plain


@on_ranks(2)
def test_stored_weights(rank: int) -> None:
    """In every way."""
    for masters in (False, True):
        _as_unsharded(stored(HYBRID, masters=masters, accumulate=3, offload=True, nested=True))
        _as_unsharded(stored(HYBRID, masters=masters, checkpoint=True, reshard=False))
        _as_unsharded(stored("fp8-delayed", masters=masters, accumulate=2, checkpoint=True, reshard=False))
        _as_unsharded(stored("fp8-current", masters=masters, accumulate=2, stays=True))
    for recipe in STORED[1::2]:
        _as_unsharded(stored(recipe, masters=True, mixed=True, blocks=1))
    _as_unsharded(stored(HYBRID, optimizer=OPTIMIZERS["fused"], mixed=True, checkpoint=True, reshard=False))


@on_ranks(4)
def test_stored_weights_on_four_ranks(rank: int) -> None:
    _as_unsharded(stored("fp8-current", masters=True, blocks=1))
    _as_unsharded(stored("fp8-delayed", mixed=True, blocks=1))
    _as_unsharded(stored(HYBRID, masters=True, mixed=True, reshard=False, blocks=1))


@on_ranks(1)
def test_stored_weights_on_one_rank(rank: int) -> None:
    """There is nobody to share with, and FSDP2 runs all the same."""
    ways = [stored(recipe, masters=i % 2 == 0, mixed=i % 2 == 1, blocks=1) for i, recipe in enumerate(STORED)]
    assert len({tuple(_as_unsharded(way)) for way in ways}) == len(STORED)
