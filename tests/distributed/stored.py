"""Models whose weights are stored quantized, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import fully_shard
from sharded import enough, model
from support.comparing import copy_bytes, equal_states
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights

W8 = "x=mxfp8(), w={}, dy=mxfp8()"
RECIPES = [
    "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", W8.format("fp8(scaling=row)"),
    W8.format("nvfp4(block=16x16)"), W8.format("hybrid(row=nvfp4, col=mxfp8)"),
    W8.format("hybrid(row=fp8, col=nvfp4, col_source=row)"), W8.format("identity(dtype=bfloat16)"),
]  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "foreach": lambda params: AdamW(params, lr=1e-2, foreach=True),
    "fused": lambda params: AdamW(params, lr=1e-2, fused=True),
    "one by one": lambda params: AdamW(params, lr=1e-2, foreach=False),
    "sgd": lambda params: SGD(params, lr=0.1, foreach=False),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
}


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    recipe: str
    optimizer: str = "foreach"
    masters: bool = False
    scheduled: bool = False
    accumulate: int = 1
    checkpoint: bool = False
    reshard: bool = True
    offload: bool = False
    bf16: bool = False
    mixed: bool = False
    blocks: int = 2


def converted(recipe: str, bf16: bool = False, blocks: int = 2) -> nn.Sequential:
    net = model(256, 256, blocks)
    return lpq.convert(net.bfloat16() if bf16 else net, recipe, weights="quantized")


def sharded(net: nn.Sequential, reshard: bool = True, offload: bool = False, mixed: bool = False) -> nn.Sequential:
    options = {
        "reshard_after_forward": reshard,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy(),
    }
    for module in (*net, net):
        fully_shard(module, **options)
    return net


def optimizer_of(net: nn.Module, way: Way) -> Optimizer:
    optimizer = OPTIMIZERS[way.optimizer](net.parameters())
    return MasterWeights(optimizer, keep=way.masters)


def step(net: nn.Sequential, optimizer: Optimizer, number: int, way: Way) -> float:
    total = 0.0
    for micro in range(way.accumulate):
        if hasattr(net, "set_requires_gradient_sync"):
            net.set_requires_gradient_sync(micro == way.accumulate - 1)
        random = torch.Generator().manual_seed(10 * number + micro)
        x = torch.randn(32, 256, generator=random, dtype=torch.bfloat16 if way.bf16 or way.mixed else torch.float32)
        loss = (net(x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(net: nn.Sequential, way: Way) -> tuple[list[float], Optimizer]:
    if way.checkpoint:
        for i, block in enumerate(net):
            net[i] = checkpoint_wrapper(block)
    optimizer = optimizer_of(net, way)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if way.scheduled else None
    losses = []
    for number in range(3 if way.scheduled else enough(way.recipe)):  # the third has a rate that the schedule lowered
        losses.append(step(net, optimizer, number, way))
        if scheduler is not None:
            scheduler.step()
    return losses, optimizer


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def parts(tensor: Tensor) -> dict[str, Tensor]:
    if not isinstance(tensor, QuantizedTensor):
        return {"": copy_bytes(tensor)}
    return {f"{d}.{n}": copy_bytes(b) for d, s in tensor.operands for n, b in s.buffers().items()}


def same_parts(ours: nn.Module, theirs: nn.Module, about: Any) -> None:
    """This rank holds its piece of the unsharded model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        rows = q.shape[0] // ranks
        assert equal_states(parts(local(p)), parts(q.detach()[rank * rows : (rank + 1) * rows])), (about, name)
