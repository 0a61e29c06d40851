"""Passes in other orders than forward, backward: what is gathered for backward is of the forward that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import fully_shard, on_ranks
from sharded import SMALL, How, batch, built
from support.comparing import equal
from torch import Tensor, nn

import lpq

DELAYED = [
    "x=identity(dtype=float32), w=fp8(scaling=delayed), dy=identity(dtype=float32)",
    "x=mxfp8, w=hybrid(row=mxfp8, col=fp8(scaling=delayed, history=2)), dy=mxfp8",
    "fp8-delayed",
]


def _outgrown(recipe: str, weights: Any) -> Any:
    """A layer whose weight is larger than what it remembers."""
    torch.manual_seed(0)
    net: Any = lpq.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), recipe, weights=weights)
    fully_shard(net[0])
    fully_shard(net)
    net(_input(1)).sum().backward()
    with torch.no_grad():
        net[0].weight.mul_(3.0)
    return net


def _input(number: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).requires_grad_()


def _in_turn(net: nn.Module, a: Tensor, b: Tensor) -> None:
    net(a).square().sum().backward()
    net(b).square().sum().backward()


def _interleaved(net: nn.Module, a: Tensor, b: Tensor) -> None:
    first, second = net(a).square().sum(), net(b).square().sum()
    first.backward()
    second.backward()


def _twice(net: nn.Module, a: Tensor, b: Tensor) -> None:
    net(net(a) + b).square().sum().backward()


def _again(net: nn.Module, a: Tensor, b: Tensor) -> None:
    loss = net(a + b).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


ORDERS: list[Callable[[nn.Module, Tensor, Tensor], None]] = [_in_turn, _interleaved, _twice, _again]


@on_ranks(2)
def test_backward_encodes_with_what_forward_recalled(rank: int) -> None:
    for recipe in DELAYED:
        seen = []
        for order in ORDERS:
            found = []
            for weights in (None, "high_precision"):
                a, b = _input(2), _input(3)
                order(_outgrown(recipe, weights), a, b)
                found.append((a.grad, b.grad))
            assert equal(*found), (recipe, order)
            seen.append(found[0][1])
        if recipe != "fp8-delayed":  # negative control: a memory that moved makes a difference
            assert not equal(*([gradient] for gradient in seen[:2])), recipe


def _trained_after(recipe: str, weights: Any) -> None:
    """Ordinary parameters could not be trained after that, with FSDP2 alone either."""
    grads = []
    for evaluated in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        fully_shard(lpq.convert(net, recipe, weights=weights))
        for number in range(2):
            with torch.inference_mode() if evaluated else torch.no_grad():
                net(_input(number))
            net(_input(number)).square().sum().backward()
        grads.append([p.grad.to_local() for p in net.parameters() if p.grad is not None])  # type: ignore[attr-defined]
    assert len(grads[0]) == 2
    assert equal(*grads), (recipe, weights)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_the_first_forward_may_be_in_inference_mode(rank: int, ranks: int) -> None:
    for recipe in ("mxfp8", "fp8-delayed", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"):
        for weights in ("high_precision", "quantized"):
            _trained_after(recipe, weights)
            if ranks == 1:  # FSDP2 itself cannot do it with ordinary parameters, which blocks have
                continue
            how = How(recipe, weights=weights, reshard=recipe != "mxfp8", **SMALL)
            net, expected = built(how), built(how)
            for number in range(2):
                with torch.inference_mode():
                    seen = net(batch(number, how))
                with torch.no_grad():
                    assert torch.equal(seen, expected(batch(number, how))), (recipe, weights, number)
