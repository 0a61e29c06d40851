"""Under FSDP2 too, swiglu as one function is, to the bit, its three layers one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import fully_shard, spawn
from support.comparing import equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from lpq.nn import SwiGLU
from lpq.optim import MasterWeights

Mlp = type[Any]


class Plain(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Others(nn.Module):
    """A block that ``lpq.fuse`` finds."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), mlp(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.norm(x))
        assert ("FusedMLP" in type(y.grad_fn).__name__) == (not isinstance(self.mlp, Plain))
        return x + y


def _trained(mlp: Mlp, recipe: str, weights: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(Block(mlp), Block(mlp))
    lpq.convert(net, recipe, weights=weights, fuse=True)
    for block in net:
        if mlp is Others:
            fully_shard(block.mlp)
        fully_shard(block)
    fully_shard(net)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = MasterWeights(optimizer, keep=False) if weights == "quantized" else optimizer
    found = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        y = net(x)
        y.square().mean().backward()
        found += [y.detach(), *(p.grad.to_local() for p in net.parameters() if isinstance(p.grad, DTensor))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(b.clone() for _, b in net.named_buffers(remove_duplicate=False))]  # norms share histories


def check_sharded(rank: int, recipe: str, weights: Any) -> None:
    assert equal(_trained(SwiGLU, recipe, weights), _trained(Plain, recipe, weights))


def check_fused(rank: int, weights: Any) -> None:
    assert equal(_trained(Others, "fp8-current", weights), _trained(Plain, "fp8-current", weights))


@pytest.mark.parametrize("weights", [None, "high_precision"])
def test_a_fused_block_that_is_a_unit(weights: Any) -> None:
    spawn(check_fused, 2, weights)


@pytest.mark.parametrize(
    ("recipe", "weights"),
    [
        ("fp8-current", None),
        ("fp8-current", "high_precision"),
        ("fp8-delayed", "high_precision"),
        ("nvfp4", "high_precision"),
        ("mxfp8", "quantized"),
    ],
)
def test_sharded(recipe: str, weights: Any) -> None:
    spawn(check_sharded, 2, recipe, weights)
