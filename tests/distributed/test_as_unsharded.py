"""Weights that are stored quantized: sharded training is unsharded training, bit for bit."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from ranks import on_one, on_ranks
from stored import OPTIMIZERS, RECIPES, W8, Way, converted, parts, same_parts, sharded, train
from support.comparing import equal_states
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights
from lpq.tensor.encode_writes import overwrite


class Mixed(nn.Sequential):
    """The meaning of ``MixedPrecisionPolicy``: a model in fp32, and one in bf16 which computes in its place."""

    def __init__(self, net: nn.Sequential, recipe: str) -> None:
        super().__init__(*net)
        self._in_bf16 = [converted(recipe, bf16=True, blocks=len(net))]  # not a part of it
        for own, other in zip(self.parameters(), self._in_bf16[0].parameters(), strict=True):
            other.register_post_accumulate_grad_hook(lambda other, own=own: self._take_gradient(own, other))

    @staticmethod
    def _take_gradient(own: Tensor, other: Tensor) -> None:
        assert other.grad is not None
        own.grad, other.grad = other.grad.float(), None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.parameters(), self._in_bf16[0].parameters(), strict=True):
                if isinstance(own, QuantizedTensor):
                    assert isinstance(other, QuantizedTensor)
                    overwrite(other, own.row, own.col)
                else:
                    other.copy_(own)
        computed = self._in_bf16[0](x)
        assert computed.dtype == torch.bfloat16
        return computed


class Alone(NamedTuple):
    """A model's parameters before and after it was trained unsharded, its losses, and the masters."""

    before: list[Tensor]
    after: nn.ParameterList
    losses: list[float]
    masters: list[Tensor]


@functools.cache
def _alone(way: Way) -> Alone:
    return on_one(_trained_alone, way)


def _trained_alone(way: Way) -> Alone:
    net = converted(way.recipe, way.bf16, way.blocks)
    before = [copy.deepcopy(p.detach()) for p in net.parameters()]
    losses, optimizer = train(Mixed(net, way.recipe) if way.mixed else net, way)
    masters = [*optimizer.masters.values()] if isinstance(optimizer, MasterWeights) else []
    return Alone(before, nn.ParameterList(nn.Parameter(p.detach(), False) for p in net.parameters()), losses, masters)


def _as_unsharded(way: Way) -> list[float]:
    before, alone, losses, masters = _alone(replace(way, checkpoint=False, reshard=True, offload=False))
    ours = converted(way.recipe, way.bf16, way.blocks)
    if way.checkpoint:
        for i, block in enumerate(ours):
            ours[i] = checkpoint_wrapper(block)
        way = replace(way, checkpoint=False)
    sharded(ours, way.reshard, way.offload, way.mixed)
    weights = [b.up.weight for b in ours] + [b.down.weight for b in ours]
    assert all(isinstance(w._local_tensor, QuantizedTensor) for w in weights)
    again, optimizer = train(ours, way)
    assert again == losses, way
    same_parts(ours, alone, way)
    assert not any(equal_states(parts(a), parts(b)) for a, b in zip(before, alone, strict=True))
    if way.masters:
        assert isinstance(optimizer, MasterWeights)
        assert len(optimizer.masters) == len(masters) == 2 * way.blocks
        for a, b in zip(optimizer.masters.values(), masters, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a.full_tensor(), b), way
    return losses


MIXED = W8.format("hybrid(row=nvfp4, col=fp8)")


@on_ranks(2)
def test_every_optimizer(rank: int) -> None:
    """Each with masters or without; ``test_before_forward`` has both."""
    for i, optimizer in enumerate(OPTIMIZERS):
        _as_unsharded(Way(MIXED, optimizer, masters=i % 2 == 0, scheduled=optimizer != "foreach"))
    plain = _as_unsharded(Way("fp8-current", masters=True))
    assert _as_unsharded(Way("fp8-current", masters=True, scheduled=True)) != plain


@on_ranks(2)
def test_every_way(rank: int) -> None:
    for masters in (False, True):
        _as_unsharded(Way(MIXED, masters=masters, accumulate=3, offload=True))
        _as_unsharded(Way(MIXED, masters=masters, checkpoint=True, reshard=False))
        _as_unsharded(Way("fp8-delayed", masters=masters, accumulate=2, checkpoint=True, reshard=False))


@on_ranks(2)
def test_mixed_precision(rank: int) -> None:
    for recipe in RECIPES[1::2]:
        _as_unsharded(Way(recipe, masters=True, mixed=True, blocks=1))
    _as_unsharded(Way(MIXED, "fused", mixed=True, checkpoint=True, reshard=False))


@on_ranks(4)
def test_on_four_ranks(rank: int) -> None:
    hybrid = W8.format("hybrid(row=nvfp4, col=fp8(scaling=row))")
    for way in (
        Way("fp8-current", masters=True, blocks=1),
        Way(hybrid, "fused", blocks=1),
        Way("fp8-delayed", mixed=True, blocks=1),
        Way(hybrid, masters=True, mixed=True, reshard=False, blocks=1),
    ):
        _as_unsharded(way)


@on_ranks(1)
def test_on_one_rank(rank: int) -> None:
    """There is nobody to share with, and FSDP2 runs all the same."""
    ways = [Way(recipe, masters=i % 2 == 0, mixed=i % 2 == 1, blocks=1) for i, recipe in enumerate(RECIPES)]
    assert len({tuple(_as_unsharded(way)) for way in ways}) == len(RECIPES)
