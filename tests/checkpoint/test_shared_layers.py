"""A layer that is in two places of a model: it has two names in a state dict, and one set of everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from torch import nn

import lpq
from lpq import checkpoint
from lpq.optim import MasterWeights, load_high_precision


def twice(recipe: str | None = None, **how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    return lpq.convert(net, recipe, **how) if recipe is not None else net


def test_memories_come_and_go(tmp_path: Path) -> None:
    remembers = twice("fp8-delayed")
    remembers(torch.randn(8, 64)).sum().backward()
    checkpoint.save(twice(), tmp_path / "without")
    checkpoint.load(remembers, tmp_path / "without", any_policy=True)
    assert not remembers[0].x_amax_history.any()
    remembers(torch.randn(8, 64)).sum().backward()
    checkpoint.save(remembers, tmp_path / "with")
    checkpoint.load(twice("fp8-current"), tmp_path / "with", any_policy=True)
    lpq.export(remembers, tmp_path / "decoded.pt", layout="lpq", decode=True)
    names = torch.load(tmp_path / "decoded.pt", weights_only=True)["model"]
    assert list(names) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def _largest_of_all(rank: int, folder: Path) -> None:
    net, other = twice("fp8-delayed"), twice("fp8-delayed")
    for memory in net[0].memories().values():
        memory.fill_(1.0 + rank)
    checkpoint.save(net, folder, process_group=dist.group.WORLD)
    checkpoint.load(other, folder)
    assert all(memory.unique().tolist() == [2.0] for memory in other[0].memories().values())


def test_memories_are_those_of_all_ranks(tmp_path: Path) -> None:
    spawn(_largest_of_all, 2, tmp_path)


@pytest.mark.parametrize("given", [False, True])
def test_a_weight_takes_its_master(given: bool, tmp_path: Path) -> None:
    net = twice("mxfp8", weights="quantized")
    optimizer = MasterWeights(torch.optim.SGD(net.parameters(), lr=0.1))
    load_high_precision(net, twice().state_dict(), optimizer)
    net(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    checkpoint.save(net, tmp_path, optimizer)
    plain = twice()
    checkpoint.load(plain, tmp_path, torch.optim.SGD(plain.parameters(), lr=0.1) if given else None, any_policy=True)
    assert torch.equal(plain[0].weight, optimizer.masters[net[0].weight])
    assert not torch.equal(plain[0].weight, net[0].weight.dequantize())
