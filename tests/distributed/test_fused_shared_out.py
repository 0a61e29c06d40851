"""Blocks and norms that lpq.fuse has found, under FSDP2: what the report says is fused."""

from __future__ import annotations

from typing import Any

import torch
from ranks import fully_shard, on_ranks
from support.small_models import Normed
from torch import nn

import lpq


class Apart(nn.Module):
    """Norms whose output is not encoded: one is used elsewhere, and one goes to a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.twice = nn.LayerNorm(64), nn.RMSNorm(64, eps=1e-6)
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.right(self.left(self.other(x).sin()) + self.twice(x))
        z: torch.Tensor = self.right(self.twice(x)) + y
        return z


@on_ranks(2)
def test_fsdp_keeps_the_reasons_of_norms_that_are_not_fused(rank: int) -> None:
    for weights in (None, "high_precision"):
        net: Any = lpq.convert(nn.Sequential(Apart()), "mxfp8", weights=weights, fuse=True)
        before = lpq.report(net).apart
        assert [entry.name for entry in before] == ["0.other", "0.twice"]
        for module in (net[0].other, net[0], net):  # a norm may be a unit of its own
            fully_shard(module)
        after = lpq.report(net).apart
        assert [(entry.name, entry.note) for entry in after] == [(entry.name, entry.note) for entry in before]


@on_ranks(2)
def test_fsdp(rank: int) -> None:
    """FSDP2 gathers a weight for each pass: between passes it lies over the ranks, too."""
    for weights in (None, "high_precision", "quantized"):
        torch.manual_seed(0)
        ranks = 2 if weights == "quantized" else None
        net: Any = lpq.convert(
            nn.Sequential(Normed(nn.RMSNorm), Normed(nn.RMSNorm)), "mxfp8", weights=weights, ranks=ranks, fuse=True
        )
        for block in (*net, net):
            fully_shard(block)
        for _ in range(2):
            report = lpq.report(net)
            assert not report.apart, report
            assert len(report.fused) == 4
            net(torch.randn(2, 16, 64)).square().mean().backward()
