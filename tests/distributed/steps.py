"""Steps of optimizers over weights that are stored quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stored import local, parts
from support.comparing import equal_states
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer

from lpq.core import QuantizedTensor
from lpq.observe import collectives
from lpq.optim import MasterWeights

WRITERS: dict[str, Callable[[Any], Optimizer]] = {
    "loop": lambda params: AdamW(params, lr=1e-2, weight_decay=0.5, foreach=False),
    "foreach": lambda params: AdamW(params, lr=1e-2, weight_decay=0.5, foreach=True),
    "fused": lambda params: AdamW(params, lr=1e-2, weight_decay=0.5, fused=True),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "nadam": lambda params: NAdam(params, lr=1e-2, weight_decay=0.5, decoupled_weight_decay=True, foreach=False),
    "adagrad": lambda params: Adagrad(params, lr=1e-2, foreach=True),
}


def stored_weights(net: nn.Module) -> list[Tensor]:
    return [p for p in net.parameters() if isinstance(local(p), QuantizedTensor)]


def bytes_of(net: nn.Module) -> list[dict[str, Tensor]]:
    return [parts(local(p.detach())) for p in net.parameters()]


def equal(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return all(equal_states(x, y) for x, y in zip(a, b, strict=True))


def give_gradients(net: nn.Module, number: int) -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(number), dtype=next(net.parameters()).dtype)
    (net(x) - x.roll(1, 0)).float().square().mean().backward()


def rounding(optimizer: Optimizer) -> MasterWeights:
    """It keeps no masters."""
    return MasterWeights(optimizer, keep=False)


class Does(Optimizer):
    """Its step is a function of the parameter."""

    def __init__(self, params: Any, update: Callable[[Tensor], None]) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p)


def reductions(optimizer: Optimizer, *args: Any) -> int:
    with collectives() as seen:
        optimizer.step(*args)
    optimizer.zero_grad()
    assert {c.kind for c in seen} <= {"all_reduce"}
    return len(seen)
