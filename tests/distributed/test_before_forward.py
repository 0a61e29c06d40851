"""Stored weights are written to before FSDP2 has ever gathered them: no forward has told them who has the others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import spawn
from sharded import How, built
from sharded import step as train_step
from stored import OPTIMIZERS, W8, Way, converted, local, optimizer_of, parts, same_parts, sharded, step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

import lpq
from lpq.core import QuantizedTensor

RECIPES = ["fp8-current", W8.format("hybrid(row=nvfp4, col=fp8(scaling=row))")]


def give_gradients(net: nn.Module) -> None:
    """The largest values are in the last rows, which one rank has."""
    random = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        whole = torch.randn(parameter.shape, generator=random)
        whole[-1] *= 100
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole.to(parameter.device)


def _stepped(net: nn.Sequential, optimizer: Optimizer) -> None:
    for _ in range(2):
        give_gradients(net)
        optimizer.step()
    optimizer.zero_grad()


def _unattached(net: nn.Sequential) -> bool:
    stored = [local(p) for p in net.parameters() if isinstance(local(p), QuantizedTensor)]
    return len(stored) == 4 and all(part.amax_group == "unattached" for part in stored)


def _any_optimizer(rank: int, recipe: str) -> None:
    """Each with masters or without; with the other recipe the other way."""
    for i, kind in enumerate(OPTIMIZERS):
        way = Way(recipe, kind, masters=i % 2 == RECIPES.index(recipe))
        alone, ours = converted(recipe), sharded(converted(recipe))
        before = [parts(p) for p in alone.parameters()]
        assert _unattached(ours)
        optimizers = [optimizer_of(net, way) for net in (alone, ours)]
        for net, optimizer in zip((alone, ours), optimizers, strict=True):
            _stepped(net, optimizer)
        same_parts(ours, alone, way)
        assert not any(
            torch.equal(_first(old), _first(parts(new))) for old, new in zip(before, alone.parameters(), strict=True)
        )
        assert step(ours, optimizers[1], 0, way) == step(alone, optimizers[0], 0, way)
        same_parts(ours, alone, way)


def _first(found: dict[str, Tensor]) -> Tensor:
    return next(iter(found.values()))


def _a_model_that_was_loaded(rank: int, folder: str) -> None:
    """By a checkpoint, which attaches what it writes to; or whole, unpickled or copied before it was sharded."""
    way = Way("fp8-current")
    alone, trained = converted(way.recipe), sharded(converted(way.recipe))
    for net in (alone, trained):
        _stepped(net, optimizer_of(net, way))
    lpq.checkpoint.save(trained, Path(folder) / "run", step=1)

    def restored() -> nn.Sequential:
        net = sharded(converted(way.recipe))
        lpq.checkpoint.load(net, Path(folder) / "run")
        return net

    def unpickled() -> nn.Sequential:
        return sharded(pickle.loads(pickle.dumps(converted(way.recipe))))

    def copied() -> nn.Sequential:
        return sharded(copy.deepcopy(converted(way.recipe)))

    for make, reference in ((restored, alone), (unpickled, converted(way.recipe)), (copied, converted(way.recipe))):
        net = make()
        expected = copy.deepcopy(reference)
        for one in (net, expected):
            _stepped(one, optimizer_of(one, way))
        same_parts(net, expected, make.__name__)


def _shards_in_high_precision(rank: int, recipe: str) -> None:
    """They are measured when they are gathered first."""
    losses = []
    for weights in ("high_precision", None):
        how = How(recipe, weights=weights, width=64, inner=128)
        net = built(how)
        optimizer = how.optimizer(net.parameters())
        _stepped(net, optimizer)
        losses.append([train_step(net, optimizer, number, how) for number in range(2)])
    assert losses[0] == losses[1], recipe


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("check", [_shards_in_high_precision, _any_optimizer])
def test_two_ranks(check: Callable[[int, str], None], recipe: str) -> None:
    spawn(check, 2, recipe)


def test_a_model_that_was_loaded(tmp_path: Path) -> None:
    spawn(_a_model_that_was_loaded, 2, str(tmp_path))
