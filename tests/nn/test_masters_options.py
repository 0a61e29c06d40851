"""Options of parameter groups are one for MasterWeights and the optimizer it wraps, whoever sets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights

pytestmark = pytest.mark.filterwarnings("error")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), "fp8-current", weights="quantized")


def _train(model: nn.Module, optimizer: MasterWeights, scheduler: Any) -> list[float]:
    rates = []
    for number in range(4):
        torch.manual_seed(number)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.optimizer.param_groups[0]["lr"])
    return rates


def test_a_scheduler_may_be_given_either() -> None:
    found = []
    for of_inner in (False, True):
        model = _model()
        optimizer = MasterWeights(SGD(model.parameters(), lr=1.0))
        scheduler = StepLR(optimizer.optimizer if of_inner else optimizer, 1, gamma=0.5)
        rates = _train(model, optimizer, scheduler)
        # Not of the biases: torch's dequantize() returns an ordinary parameter itself, no leaf any more.
        found.append([p.dequantize() for p in model.parameters() if isinstance(p, QuantizedTensor)])
        if of_inner:
            assert rates == [0.5, 0.25, 0.125, 0.0625]
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.0625
    assert len(found[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Counting(SGD):
    """An optimizer that keeps a number in its group, as some that need no schedule do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_what_the_wrapped_optimizer_keeps_in_its_groups_stays_and_is_saved() -> None:
    model = _model()
    optimizer = MasterWeights(Counting(model.parameters(), lr=0.1))
    _train(model, optimizer, LambdaLR(optimizer, lambda step: 1.0))
    assert optimizer.optimizer.param_groups[0]["k"] == 4
    assert optimizer.state_dict()["param_groups"][0]["k"] == 4
    optimizer.param_groups[0]["k"] = 10
    optimizer.step()
    assert optimizer.param_groups[0]["k"] == 11


def test_groups_that_are_added_later_share_theirs_too() -> None:
    model = _model()
    optimizer = MasterWeights(AdamW(list(model[0].parameters()), lr=0.1))  # type: ignore[index]
    optimizer.step()
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})  # type: ignore[index]
    optimizer.optimizer.param_groups[1]["lr"] = 0.3
    optimizer.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.3]
