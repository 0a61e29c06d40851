"""Delayed scaling on several ranks: after a step all remember the largest of what each has seen; replicas of
DistributedDataParallel remember their own, or say why they would not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import fully_shard, mesh_of, of_all, on_ranks
from support.comparing import equal
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import lpq
from lpq.distributed.optimizer_steps import steps
from lpq.observe.collectives import collectives


def _net(recipe: str = "fp8-delayed", tied: bool = False, **how: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32))
    if tied:
        net[2].weight = net[0].weight
    return lpq.convert(net, recipe, **how)


def _batch(rank: int, number: int) -> Tensor:
    """Those of rank 1 are larger: what rank 0 remembers would clamp them."""
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * number + rank)) * 4**rank


def _agree(net: nn.Module) -> bool:
    mine = [buffer for name, buffer in net.named_buffers() if "history" in name]
    assert mine
    assert all(buffer.any() for buffer in mine)
    found = of_all(mine)
    largest = [torch.stack(each).amax(0) for each in zip(*found, strict=True)]
    return all(equal(own, largest) for own in found)


def _replicated(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, broadcast_buffers=False)


def _hybrid(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=mesh_of("replicate", "shard"))  # type: ignore[no-any-return]


def _frozen(net: Any) -> nn.Module:
    """As the layers beside adapters are."""
    net[0].weight.requires_grad_(False)
    return fully_shard(net)  # type: ignore[no-any-return]


def _tied(net: nn.Module) -> nn.Module:
    """A weight of two layers is not gathered quantized."""
    return fully_shard(net)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ranks", "weights", "prepare"),
    [
        (2, None, fully_shard), (2, None, _frozen), (2, None, _replicated), (4, None, _hybrid),
        (2, "high_precision", fully_shard), (2, "high_precision", _frozen), (2, "high_precision", _tied),
    ],
)  # fmt: skip
@on_ranks()
def test_ranks_remember_the_same_after_each_step(
    rank: int, ranks: int, weights: Any, prepare: Callable[[nn.Module], nn.Module]
) -> None:
    net = prepare(_net(tied=prepare is _tied, weights=weights))
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for number in range(3):
        for _ in range(2):  # micro-batches
            net(_batch(rank, number).requires_grad_()).square().mean().backward()
        assert not _agree(net)
        with collectives() as seen:
            optimizer.step()
        assert len(seen) <= 3 + (number == 0) * 4, "few, however many layers there are"
        optimizer.zero_grad()
        assert _agree(net)


@on_ranks(2)
def test_ranks_that_share_out_an_optimizer_remember_alike(rank: int) -> None:
    """Each steps some layers within the step of all: layers of one rank are not mixed with layers of the other rank."""
    net = _replicated(_net())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=SGD, lr=0.1)
    for number in range(2):
        net(_batch(rank, number)).square().mean().backward()
        seen = of_all([buffer.clone() for name, buffer in net.named_buffers() if "history" in name])
        optimizer.step()
        assert _agree(net)
        largest = [torch.stack(each).amax(0) for each in zip(*seen, strict=True)]
        assert equal([buffer for name, buffer in net.named_buffers() if "history" in name], largest)


class _WithAnother(Optimizer):
    """An optimizer that has another one step the parameters that it does not step itself."""

    def __init__(self, own: list[Tensor], others: list[Tensor]) -> None:
        super().__init__(own, {})
        self.optim = SGD(others, lr=0.1)

    def step(self) -> None:  # type: ignore[override]
        self.optim.step()


@on_ranks(2)
def test_an_optimizer_that_has_others_step_other_parameters(rank: int) -> None:
    """Its step is no step of theirs."""
    net: Any = _replicated(_net())
    first, *others = net.parameters()
    optimizer = _WithAnother([first], others)
    for number in range(2):
        net(_batch(rank, number)).square().mean().backward()
        optimizer.step()
        assert _agree(net)


def test_a_part_of_a_step_that_raised_goes_with_its_optimizer() -> None:
    """As after a step that ran out of memory, where the optimizer is made anew: the part has the states."""
    steps()  # it calls the hooks from here on
    param = nn.Parameter(torch.ones(2))
    optimizer = _WithAnother([param], [param])
    optimizer.step()
    part = weakref.ref(optimizer.optim)
    with mock.patch.object(optimizer.optim, "step", side_effect=RuntimeError), pytest.raises(RuntimeError):
        optimizer.step()
    assert part() is not None
    del optimizer
    gc.collect()
    assert part() is None


@on_ranks(2)
def test_replicas_that_would_not_remember_their_own(rank: int) -> None:
    for recipe in ("fp8-current", "x=fp8(), w=fp8(scaling=delayed), dy=fp8()"):  # the weight's is the same on all ranks
        DistributedDataParallel(_net(recipe))(_batch(rank, 0)).sum().backward()
    for compiled in (False, True):
        net = _net()
        if compiled and rank == 0:
            net.compile(backend="aot_eager")
        with pytest.raises(RuntimeError, match=r"layer 0, lpq.nn.Linear\(32, 32\): .*broadcast_buffers=False"):
            DistributedDataParallel(net)(_batch(rank, 0))
    alone = _net()
    net = _replicated(copy.deepcopy(alone))
    for step in range(3):
        got, expected = net(_batch(rank, step)), alone(_batch(rank, step))
        assert torch.equal(got, expected), step
        for y in (got, expected):
            y.sum().backward()
    assert alone[0].x_amax_history.max() > 0


@on_ranks(2)
def test_replicas_that_would_go_on_without_a_rank(rank: int) -> None:
    """The states of that step would have no counterpart there: gloo ended the processes."""

    def steps_of(recipe: str, batches: int, **options: Any) -> Any:
        net = _replicated(_net(recipe))
        optimizer = SGD(net.parameters(), lr=0.1)
        with net.join(**options):
            for number in range(batches):
                net(_batch(rank, number)).square().mean().backward()
                optimizer.step()
        return net

    steps_of("fp8-current", 1 + rank)
    words = (
        r"layer 0, lpq\.nn\.Linear\(32, 32\): .*inside of join\(\) a rank without a batch does not: give each rank as"
    )
    for batches in (1 + rank, 2):
        with pytest.raises(RuntimeError, match=words):
            steps_of("fp8-delayed", batches)
    with pytest.raises(RuntimeError, match=r"exhausted (all )?inputs"):
        steps_of("fp8-delayed", 1 + rank, throw_on_early_termination=True)
    for options in ({"throw_on_early_termination": True}, {"enable": False}):
        assert _agree(steps_of("fp8-delayed", 2, **options))
