"""accelerate's optimizer stands for the one that it was made of, with masters too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lpq
from lpq import checkpoint
from lpq.optim import MasterWeights, load_high_precision

accelerate: Any = pytest.importorskip("accelerate", reason="needs accelerate, which `make install` brings")
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), "mxfp8", weights="quantized")


def prepared(model: nn.Module, steps: int) -> Any:
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.optimizer = MasterWeights(optimizer.optimizer)
    for _ in range(steps):
        (model(X) - X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def masters(optimizer: Any) -> list[torch.Tensor]:
    return [*getattr(optimizer, "optimizer", optimizer).masters.values()]


def test_a_checkpoint_has_the_optimizer_for_which_it_stands(tmp_path: Path) -> None:
    model = net()
    optimizer = prepared(model, steps=2)
    checkpoint.save(model, tmp_path, optimizer, step=2)
    expected = copy.deepcopy(masters(optimizer))
    assert len(expected) == 2
    other = net()
    again = prepared(other, steps=1)
    checkpoint.load(other, tmp_path, again)
    assert all(map(torch.equal, masters(again), expected))
    own = net()
    alone = MasterWeights(torch.optim.AdamW(own.parameters(), lr=1e-2))
    checkpoint.load(own, tmp_path, alone)
    assert all(map(torch.equal, alone.masters.values(), expected))


def test_masters_are_filled_through_it() -> None:
    model, plain = net(), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = prepared(model, steps=0)
    load_high_precision(model, plain.state_dict(), optimizer)
    assert all(map(torch.equal, masters(optimizer), (plain[0].weight, plain[2].weight)))
    with pytest.raises(TypeError, match=r"masters of a MasterWeights, and got a SGD: pass MasterWeights\(optimizer\)"):
        load_high_precision(model, plain.state_dict(), torch.optim.SGD(model.parameters()))
