"""A small model, sharded by FSDP2 in many ways, and what a few steps of training make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import lpq
from lpq.optim import MasterWeights

WIDTH, INNER, TOKENS = 256, 512, 32


class Block(nn.Module):
    """A gated pair of layers with a norm, some parameters of which stay in high precision."""

    def __init__(self, width: int, inner: int, vectors: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=vectors)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=vectors)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(width: int = WIDTH, inner: int = INNER, blocks: int = 2, vectors: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, inner, vectors) for _ in range(blocks)))


@dataclass(frozen=True)
class How:
    """How a model is converted, sharded and run."""

    recipe: Any
    weights: Any = "high_precision"
    width: int = WIDTH
    inner: int = INNER
    blocks: int = 2
    vectors: bool = True
    """Whether norms and layers have parameters that are vectors."""
    mesh: DeviceMesh | None = None
    mixed: bool = False
    reshard: bool = True
    offload: bool = False
    checkpoint: bool = False
    nested: bool = False
    compile: bool = False
    backend: str = "inductor"
    accumulate: int = 1
    own_data: bool = False
    ranks: int | None = None
    shard: bool = True
    device: str = "cpu"
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True)
    )


def built(how: How) -> nn.Sequential:
    """The model, converted and sharded."""
    net = model(how.width, how.inner, how.blocks, how.vectors).to(how.device)
    lpq.convert(net, how.recipe, weights=how.weights, ranks=how.ranks if how.weights else None)
    if how.checkpoint:
        for i, block in enumerate(net):
            net[i] = checkpoint_wrapper(block)
    if how.compile:
        for block in net:
            block.compile(fullgraph=True, backend=how.backend)
    if how.shard:
        options: dict[str, Any] = {
            "mesh": how.mesh or init_device_mesh(how.device, (dist.get_world_size(),)),
            "reshard_after_forward": how.reshard,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16) if how.mixed else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if how.offload else OffloadPolicy(),
        }
        for block in net:
            if how.nested:
                fully_shard(block.up, **options)
            fully_shard(block, **options)
        fully_shard(net, **options)
    return net


def batch(step: int, how: How, micro: int = 0, rank: int = 0) -> Tensor:
    x = torch.randn(TOKENS, how.width, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
    return x.to(how.device, torch.bfloat16 if how.mixed else torch.float32)


def optimizer_for(how: How, net: nn.Module) -> torch.optim.Optimizer:
    """One that keeps no masters, unless it is asked for one that does."""
    optimizer = how.optimizer(net.parameters())
    wraps = how.weights == "quantized" and not isinstance(optimizer, MasterWeights)
    return MasterWeights(optimizer, keep=False) if wraps else optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int, how: How) -> float:
    """One optimizer step, on the same data on all ranks unless each has its own; its loss."""
    rank = dist.get_rank() if how.own_data else 0
    total = 0.0
    for micro in range(how.accumulate):
        if how.accumulate > 1 and how.shard:
            net.set_requires_gradient_sync(micro == how.accumulate - 1)  # type: ignore[operator]
        x = batch(number, how, micro, rank)
        loss = (net(x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def enough(recipe: Any) -> int:
    """How many steps show all: the second computes with what the first wrote; where amaxes are remembered, the third
    computes with what the second recalled."""
    return 3 if "delayed" in str(recipe) else 2


def train(how: How, steps: int | None = None) -> tuple[list[float], nn.Sequential]:
    """The losses of some steps, and the model after them."""
    net = built(how)
    optimizer = optimizer_for(how, net)
    return [step(net, optimizer, i, how) for i in range(enough(how.recipe) if steps is None else steps)], net


def whole(parameter: Tensor) -> Tensor:
    """A parameter, put together from all ranks."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    return list(a) == list(b)
