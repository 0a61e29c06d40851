"""Weights are written to before FSDP2 has ever gathered them: no forward has told stored ones who has the others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import on_ranks
from sharded import (
    SMALL,
    W8,
    How,
    built,
    give_gradients,
    optimizer_for,
    same_parts,
    sharded,
    step,
    stored,
)
from torch import nn
from torch.optim import Optimizer

import lpq

RECIPES = ["fp8-current", W8.format("hybrid(row=nvfp4, col=fp8(scaling=row))")]


def _stepped(net: nn.Sequential, optimizer: Optimizer) -> None:
    for _ in range(2):
        give_gradients(net)
        optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_model_that_was_loaded(rank: int, tmp_path: Path) -> None:
    """By a checkpoint, which attaches what it writes to; or whole, unpickled or copied before it was sharded."""
    how = stored("fp8-current")
    unsharded = replace(how, shard=False)
    alone, trained = built(unsharded), built(how)
    for net in (alone, trained):
        _stepped(net, optimizer_for(how, net))
    lpq.checkpoint.save(trained, tmp_path / "run", step=1)

    def restored(net: nn.Sequential) -> nn.Sequential:
        lpq.checkpoint.load(sharded(net, how), tmp_path / "run")
        return net

    def unpickled(net: nn.Sequential) -> nn.Sequential:
        return sharded(pickle.loads(pickle.dumps(net)), how)

    def copied(net: nn.Sequential) -> nn.Sequential:
        return sharded(copy.deepcopy(net), how)

    makes: list[Callable[[nn.Sequential], nn.Sequential]] = [restored, unpickled, copied]
    for make in makes:
        net, expected = make(built(unsharded)), copy.deepcopy(alone) if make is restored else built(unsharded)
        for one in (net, expected):
            _stepped(one, optimizer_for(how, one))
        same_parts(net, expected, make.__name__)


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_shards_in_high_precision(rank: int, recipe: str) -> None:
    """They are measured when they are gathered first."""
    losses = []
    for weights in ("high_precision", None):
        net = built(how := How(recipe, weights=weights, **SMALL))
        optimizer = optimizer_for(how, net)
        _stepped(net, optimizer)
        losses.append([step(net, optimizer, number, how) for number in range(2)])
    assert losses[0] == losses[1], recipe
