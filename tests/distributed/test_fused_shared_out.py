"""Blocks and norms that lpq.fuse has found, where ranks share out weights: what is fused, and what the report says."""

from __future__ import annotations

from typing import Any

import torch
from ranks import fully_shard, on_ranks
from support.comparing import equal
from support.small_models import Normed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel


@on_ranks(2)
def test_tensor_parallel(rank: int) -> None:
    mesh, found = init_device_mesh("cpu", (2,)), []
    for fuse in (True, False):
        torch.manual_seed(0)
        net: Any = lpq.convert(nn.Sequential(Normed(nn.RMSNorm)), "mxfp8", fuse=fuse)
        if fuse:
            assert [entry.name for entry in lpq.report(net).fused] == ["0.norm", "0.mlp"]
        columns = {f"0.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        parallelize_module(net, mesh, {**columns, "0.mlp.down_proj": RowwiseParallel()})
        y = net(torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)))
        y.square().mean().backward()
        grads = [p.grad for p in net.parameters()]
        found.append([y.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)])
        if fuse:
            assert [entry.name for entry in lpq.report(net).fused] == ["0.norm", "0.mlp"]
    assert equal(*found)


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
