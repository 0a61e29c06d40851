"""Layers that are given the same tensor encode it once under FSDP2 too, however their weights are gathered."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import spawn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lpq
from lpq.nn.linear import Layer
from lpq.nn.siblings import Inputs

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from counting import encodings

ROWS, WIDTH = 16, 64
OF_X = (ROWS, WIDTH)


class Block(nn.Module):
    """As attention and a gated pair, with no more than they share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        y: Tensor = x + self.out(self.q(normed) * self.k(normed))
        return y


def _trained(weights: Any, apart: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block())
    lpq.convert(net, "mxfp8", weights=weights)
    for module in net.modules() if apart else ():
        if isinstance(module, Layer):
            module.share_inputs(Inputs())
    for block in net:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step in range(2):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        y = net(x)
        y.square().mean().backward()
        found += [y.detach(), *(p.grad.to_local() for p in net.parameters() if isinstance(p.grad, DTensor))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _encode_once(rank: int) -> None:
    for weights in (None, "high_precision", "quantized"):
        with pytest.MonkeyPatch.context() as patch:
            seen = encodings(patch)
            found = []
            for apart in (False, True):
                found.append(_trained(weights, apart))
                counts = Counter(w.shape for w in seen if w.dtype == torch.float32 and w.col)
                dys = counts[OF_X] - (8 if apart else 4)  # that of out has the shape of an input
                assert dys == 4, (weights, apart, counts)
                seen.clear()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), weights


def test_siblings_encode_once() -> None:
    spawn(_encode_once, 2)
