"""Replicas of DistributedDataParallel, each of which remembers its own amaxes, or says why it would not."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lpq


def _model(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), recipe)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank)) * 4**rank


@on_ranks(2)
def test_two_ranks(rank: int) -> None:
    """Rank 1 has larger inputs, which what rank 0 remembers would clamp."""
    for recipe in ("fp8-current", "nvfp4"):
        DistributedDataParallel(_model(recipe))(_batch(rank, 0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"layer 0, lpq.nn.Linear\(64, 64\): .*broadcast_buffers=False"):
        DistributedDataParallel(_model("fp8-delayed"))(_batch(rank, 0))
    compiled = _model("fp8-delayed")
    compiled.compile(backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"layer 0, lpq.nn.Linear\(64, 64\): .*broadcast_buffers=False"):
        DistributedDataParallel(compiled)(_batch(rank, 0))
    weights_alone = "x=fp8(), w=fp8(scaling=delayed), dy=fp8()"  # of which all ranks remember the same
    DistributedDataParallel(_model(weights_alone))(_batch(rank, 0)).sum().backward()
    alone = _model("fp8-delayed")
    model = DistributedDataParallel(copy.deepcopy(alone), broadcast_buffers=False)
    for step in range(3):
        got, expected = model(_batch(rank, step)), alone(_batch(rank, step))
        assert torch.equal(got, expected), step
        got.sum().backward()
        expected.sum().backward()
    assert alone[0].x_amax_history.max() > 0  # type: ignore[index, union-attr, operator]
