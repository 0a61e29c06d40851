"""Small models that FSDP2 shards in many ways: how they are built and trained, and what is compared of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.comparing import copy_bytes, equal_states
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights

WIDTH, INNER, TOKENS = 256, 512, 32
SMALL = {"width": 64, "inner": 128}
"""The sizes of a model that has no blocks of 128."""
W8 = "x=mxfp8(), w={}, dy=mxfp8()"
STORED = [
    "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", W8.format("fp8(scaling=row)"),
    W8.format("nvfp4(block=16x16)"), W8.format("hybrid(row=nvfp4, col=mxfp8)"),
    W8.format("hybrid(row=fp8, col=nvfp4, col_source=row)"), W8.format("identity(dtype=bfloat16)"),
    "nvfp4-eden",
]  # fmt: skip
"""Recipes of weights that are stored quantized."""
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "foreach": partial(AdamW, lr=1e-2, foreach=True),
    "fused": partial(AdamW, lr=1e-2, weight_decay=0.5, fused=True),
    "loop": partial(AdamW, lr=1e-2, weight_decay=0.5, foreach=False),
    "sgd": partial(SGD, lr=0.1, foreach=False),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nadam": partial(NAdam, lr=1e-2, weight_decay=0.5, decoupled_weight_decay=True, foreach=False),
    "adagrad": partial(Adagrad, lr=1e-2, foreach=True),
}


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
    bf16: bool = False
    mesh: DeviceMesh | None = None
    mixed: bool = False
    reshard: bool = True
    offload: bool = False
    checkpoint: bool = False
    nested: bool = False
    compile: bool = False
    backend: str = "inductor"
    accumulate: int = 1
    stays: bool = False
    """Whether weights stay gathered for the next micro-batch."""
    own_data: bool = False
    ranks: int | None = None
    shard: bool = True
    device: str = "cpu"
    optimizer: Callable[[Any], Optimizer] = OPTIMIZERS["foreach"]
    masters: bool = False
    """Whether stored weights have masters."""
    scheduled: bool = False


def stored(recipe: str, **options: Any) -> How:
    """Weights that are stored quantized, of small sizes that the format allows."""
    size = 256 if recipe == "fp8-block" else 128
    return How(recipe, "quantized", **{"width": size, "inner": size, **options})


def built(how: How) -> nn.Sequential:
    """The model, converted and sharded."""
    net = model(how.width, how.inner, how.blocks, how.vectors).to(how.device)
    net = net.bfloat16() if how.bf16 else net
    lpq.convert(net, how.recipe, weights=how.weights, ranks=how.ranks if how.weights else None)
    if how.checkpoint:
        for i, block in enumerate(net):
            net[i] = checkpoint_wrapper(block)
    if how.compile:
        for block in net:
            block.compile(fullgraph=True, backend=how.backend)
    if how.shard:
        sharded(net, how)
    return net


def sharded(net: nn.Sequential, how: How) -> nn.Sequential:
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
    return fully_shard(net, **options)


def batch(step: int, how: How, micro: int = 0, rank: int = 0) -> Tensor:
    x = torch.randn(TOKENS, how.width, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
    return x.to(how.device, torch.bfloat16 if how.mixed or how.bf16 else torch.float32)


def optimizer_for(how: How, net: nn.Module) -> Optimizer:
    """The optimizer, which steps stored weights too."""
    optimizer = how.optimizer(net.parameters())
    wraps = how.weights == "quantized" and not isinstance(optimizer, MasterWeights)
    return MasterWeights(optimizer, keep=how.masters) if wraps else optimizer


def step(net: nn.Module, optimizer: Optimizer, number: int, how: How) -> float:
    """One optimizer step, on the same data on all ranks unless each has its own; its loss."""
    rank = dist.get_rank() if how.own_data else 0
    total = 0.0
    for micro in range(how.accumulate):
        if how.accumulate > 1 and how.shard:
            last = micro == how.accumulate - 1
            net.set_requires_gradient_sync(last)  # type: ignore[operator]
            net.set_reshard_after_backward(last or not how.stays)  # type: ignore[operator]
        total += backward(net, batch(number, how, micro, rank))
    optimizer.step()
    optimizer.zero_grad()
    return total


def backward(net: nn.Module, x: Tensor) -> float:
    """Compute gradients, and return the loss."""
    loss = (net(x) - x.roll(1, 0)).float().square().mean()
    loss.backward()
    return loss.item()


def give_gradients(net: nn.Module) -> None:
    """Give gradients, of which the largest values are in the last rows, which one rank has."""
    random = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        gradient = torch.randn(parameter.shape, generator=random)
        gradient[-1] *= 100
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient.to(parameter.device)


def enough(recipe: Any) -> int:
    """How many steps show all: the second computes with what the first wrote; where amaxes are remembered, the third
    computes with what the second recalled."""
    return 3 if "delayed" in str(recipe) else 2


class Trained(NamedTuple):
    losses: list[float]
    net: nn.Sequential
    optimizer: Optimizer


def trained(how: How, steps: int | None = None, net: nn.Sequential | None = None) -> Trained:
    """Train a model for some steps. In the third one has a rate that a schedule lowered."""
    net = built(how) if net is None else net
    optimizer = optimizer_for(how, net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if how.scheduled else None
    losses = []
    for number in range(steps or (3 if how.scheduled else enough(how.recipe))):
        losses.append(step(net, optimizer, number, how))
        if scheduler is not None:
            scheduler.step()
    return Trained(losses, net, optimizer)


def train(how: How, steps: int | None = None) -> tuple[list[float], nn.Sequential]:
    """The losses of some steps, and the model after them."""
    return trained(how, steps)[:2]


# ---------------------------------------------------------------------------------- what is compared


def whole(parameter: Tensor) -> Tensor:
    """A parameter, put together from all ranks."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def decoded(parameter: Tensor) -> Tensor:
    """The values of this rank's part of a parameter, copied."""
    part = local(parameter.detach())
    return part.dequantize(torch.float32) if isinstance(part, QuantizedTensor) else getattr(part, "held", part).clone()


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """The bytes of this rank's part of a tensor, copied, by buffer where it is quantized."""
    part = local(tensor.detach())
    if not isinstance(part, QuantizedTensor):
        return {"": copy_bytes(getattr(part, "held", part))}
    return {f"{d}.{n}": copy_bytes(b) for d, s in part.operands for n, b in s.buffers().items()}


def bytes_of(net: nn.Module | Sequence[Tensor]) -> dict[str, Tensor]:
    """The bytes of all that this rank holds of a model, or of tensors: shards, and what layers remember."""
    tensors = net.state_dict() if isinstance(net, nn.Module) else {str(i): t for i, t in enumerate(net)}
    return {f"{name}.{part}": held for name, tensor in tensors.items() for part, held in parts(tensor).items()}


def same_weights(ours: nn.Module, theirs: nn.Module, about: Any = None) -> None:
    """Two models have the same parameters."""
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(whole(p.detach()), whole(q.detach())), (about, name)


def same_parts(ours: nn.Module, theirs: nn.Module, about: Any = None) -> None:
    """This rank holds its piece of the unsharded model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        rows = q.shape[0] // ranks
        assert equal_states(parts(p), parts(q.detach()[rank * rows : (rank + 1) * rows])), (about, name)
