"""``hybrid(row=A, col=A)`` is ``A``: sharded steps of AdamW, bit for bit, for every format and its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fully_shard, spawn
from support.comparing import copy_bytes
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights

TOKENS = 32
FORMATS = [
    "fp8", "fp8(dtype=e5m2, pow2=true)", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "mxfp8", "nvfp4",
    "nvfp4(block=16x16)", "identity", "identity(dtype=bfloat16)", "mxfp4",
]  # fmt: skip
ROTATED = ["nvfp4(rht=true)", "nvfp4(rht=true, stochastic=true)"]
"""These are for x and dy only."""
BLOCKS = ["fp8(scaling=block)", "fp8(scaling=block, block=128x128)"]
"""Half of their weights' rows, which a rank has, must be whole blocks."""
EVERY = [*FORMATS, *ROTATED, *BLOCKS]
OPTIMIZERS: dict[str, tuple[str, Callable[[Any], Optimizer]]] = {
    "high_precision": ("high_precision", lambda params: AdamW(params, lr=1e-2)),
    "stored": ("quantized", lambda params: MasterWeights(AdamW(params, lr=1e-2), keep=False)),
    "stored, with masters": ("quantized", lambda params: MasterWeights(AdamW(params, lr=1e-2))),
}


STEPS = 4


class One(nn.Module):
    """A layer behind parameters that learn from the gradient of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : self.layer.in_features]
        return (self.layer(x * self.scale) - x.roll(1, 1)).square().mean()


class Many(nn.Module):
    """One for each format; they learn side by side, and each from its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nets = nn.ModuleList(One(256 if text in BLOCKS else 64) for text in EVERY)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([net(x) for net in self.nets])


def _explicit(text: str) -> str:
    return text if text.endswith(")") else f"{text}()"


def _rules(quantizers: Sequence[str]) -> dict[str, Any]:
    rules = []
    for i, (text, of) in enumerate(zip(quantizers, EVERY, strict=True)):
        both = _explicit(text)
        weight = "mxfp8()" if of in ROTATED else both
        rules.append({"match": f"nets.{i}.*", "recipe": f"x={both}, w={weight}, dy={both}"})
    return {"rules": rules}


def _trained(quantizers: Sequence[str], how: str) -> tuple[Tensor, nn.Module]:
    """The losses, for each step and format, and the model."""
    weights, make = OPTIMIZERS[how]
    net = lpq.convert(Many(), _rules(quantizers), weights=weights)
    fully_shard(net)
    optimizer = make(net.parameters())
    torch.manual_seed(1 + dist.get_rank())  # of stochastic rounding
    losses = []
    for number in range(STEPS):
        found = net(torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(number)))
        found.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.detach())
    return torch.stack(losses), net


def _shards(net: nn.Module) -> dict[str, Tensor]:
    """The bytes of what this rank has of each parameter."""
    found = {}
    for name, parameter in net.named_parameters():
        local = parameter.to_local().detach()
        if isinstance(local, QuantizedTensor):
            for direction, operand in local.operands:
                found |= {f"{name}.{direction}.{n}": copy_bytes(t) for n, t in operand.buffers().items()}
        else:
            found[name] = copy_bytes(getattr(local, "held", local))
    return found


def _as_the_format_itself(rank: int, how: str) -> None:
    hybrids = [f"hybrid(row={text}, col={text})" for text in EVERY]
    losses, net = _trained(EVERY, how)
    again, twin = _trained(hybrids, how)
    assert [text for i, text in enumerate(EVERY) if not torch.equal(losses[:, i], again[:, i])] == []
    ours, theirs = _shards(net), _shards(twin)
    assert any(name.endswith(".row.data") for name in ours) == (OPTIMIZERS[how][0] == "quantized")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    # nothing of that is because formats make no difference, or nothing was learnt
    assert len({tuple(curve.tolist()) for curve in losses.T}) == len(EVERY)
    assert all(losses[-1] != losses[0])
    if how != "stored":  # without masters, four bits do not learn much
        assert all(losses[-1] < losses[0]), losses[-1] / losses[0]


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_two_ranks(how: str, mxfp4: None) -> None:
    spawn(_as_the_format_itself, 2, how)
