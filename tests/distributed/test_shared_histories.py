"""Layers that share what they remember of inputs, on two ranks: they compute what they compute with own histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import fully_shard, on_ranks
from support.comparing import equal, equal_states
from support.encoding_norm import Block
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import lpq
from lpq.distributed.shard import plain


def _replicated(net: Any) -> nn.Module:
    return DistributedDataParallel(net, broadcast_buffers=False)


def _layers_apart(net: Any) -> nn.Module:
    """The input of each layer passes through hooks of FSDP2."""
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)  # type: ignore[no-any-return]


def _trained(rank: int, fused: bool, weights: Any, prepare: Callable[[nn.Module], nn.Module]) -> Any:
    own: Any = lpq.convert(Block(fused), "fp8-delayed", include="all", weights=weights)
    net = prepare(own)
    optimizer = SGD(net.parameters(), lr=0.1)
    found: list[Tensor] = []
    for number in range(3):
        for _ in range(2):  # micro-batches
            draw = torch.Generator().manual_seed(10 * number + rank)
            x = (torch.randn(16, 32, generator=draw) * (1 + number + 5 * rank)).requires_grad_()
            y = net(x)
            y.square().mean().backward()
            found += [y.detach(), x.grad]  # type: ignore[list-item]
        optimizer.step()
        optimizer.zero_grad()
        found += [layer.x_amax_history.clone() for layer in own.layers]
    q, k, v = (layer.x_amax_history for layer in own.layers)
    assert (q is k is v) == fused
    return found, {name: plain(value) for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    ("weights", "prepare"),
    [(None, fully_shard), ("high_precision", _layers_apart), (None, _replicated)],
)
@on_ranks(2)
def test_they_compute_what_they_compute_apart(
    rank: int, weights: Any, prepare: Callable[[nn.Module], nn.Module]
) -> None:
    fused, apart = (_trained(rank, fused, weights, prepare) for fused in (True, False))
    assert equal(fused[0], apart[0])
    assert equal_states(fused[1], apart[1])
