"""Layers whose norms add the residual, under FSDP2: the same bits as of the layers as they were."""

from __future__ import annotations

from typing import Any

import torch
from ranks import fully_shard, on_ranks
from support.comparing import equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from lpq.nn import norms
from lpq.nn.residual_layers import ResidualLayer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(64), nn.RMSNorm(64)
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(self.first(x))
        y: Tensor = x + self.b(self.second(x))
        return y


@on_ranks(2)
def test_fsdp(rank: int) -> None:
    added: list[bool] = []
    own = norms.EncodedNorm.forward
    norms.EncodedNorm.forward = staticmethod(  # type: ignore[assignment]
        lambda ctx, *args: [added.append(args[-2] is not None), own(ctx, *args)][1]
    )
    for weights in (None, "high_precision", "quantized"):
        found = []
        for fuse in (False, True):
            torch.manual_seed(0)
            ranks = 2 if weights == "quantized" else None
            model = nn.Sequential(Layer(), Layer()).bfloat16()
            net: Any = lpq.convert(model, "fp8-current", weights=weights, ranks=ranks, fuse=fuse)
            for block in (*net, net):
                fully_shard(block)
            assert all(isinstance(block, ResidualLayer) == fuse for block in net)
            added.clear()
            results = []
            for step in range(2):
                x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(step + rank)).bfloat16()
                x.requires_grad_()
                y = net(x)
                y.square().mean().backward()
                grads = [p.grad for p in net.parameters()]
                results += [y.detach(), x.grad, *(g.to_local() for g in grads if isinstance(g, DTensor))]
            assert len(results) == 20
            found.append(results)
            assert added == ([False, True, False, True] * 2 if fuse else []), (
                weights,
                fuse,
                added,
                str(lpq.report(net)),
            )
            notes = [entry.note for entry in lpq.report(net).fused]
            assert notes.count(next(iter(notes), "")) == (4 if fuse else 0)
            assert all(note.endswith("it adds the residual, too") for note in notes)
        assert equal(*found), weights
