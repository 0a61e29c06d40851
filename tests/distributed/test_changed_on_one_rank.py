"""A recipe that one rank alone has changed, once all had compared: all raise, and a step has no further collective.
Where bytes that travel follow from the recipe, that rank keeps the former one until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import agreed, fully_shard, on_ranks
from support.comparing import equal
from test_other_models_shared_out import COMPARED
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import lpq
from lpq.distributed import alike, meeting, model_check
from lpq.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel
from lpq.observe import collectives

X = torch.ones(2, 32, 64)
OTHER = "fp8-row"
Training = Callable[[], Any]


def _net(recipe: Any = "mxfp8", **how: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return lpq.convert(net, recipe, **how)


def _training(net: nn.Module) -> Training:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        net(X).sum().backward()
        optimizer.step()

    return step


def _replicated(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, broadcast_buffers=False)


def _until_it_is_found(step: Training) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        step()


@on_ranks(2)
def test_all_raise(rank: int) -> None:
    for shared in (_replicated, fully_shard):
        for recipe in ("mxfp8", "fp8-delayed"):
            inner = _net(recipe)
            step = _training(shared(inner))
            step()
            if rank == 1:
                inner[2].recipe = OTHER  # type: ignore[index]
            with mock.patch.object(meeting, "SOON", 0.1):
                found = agreed(lambda: _until_it_is_found(step), RuntimeError)  # noqa: B023
            for said in found:
                assert "the ranks do not have the same model: rank 0 has [" in said, said
                assert ", and rank 1 has [2: Linear with a weight [64, 128] of torch.float32" in said, said
                assert said.endswith("alike on all ranks"), said


@on_ranks(2)
def test_a_step_that_one_rank_alone_is_given(rank: int) -> None:
    """After the last one that changes a recipe. While one may still come, ranks compare steps in each step."""
    rules = [{"match": "*", "recipe": "mxfp8", "until": 1}, {"match": "*", "recipe": "nvfp4"}]
    inner = _net({"rules": rules})
    step = _training(_replicated(inner))
    for number in range(3):
        lpq.set_step(inner, number)
        step()
    if rank == 1:
        lpq.set_step(inner, 0)
    with mock.patch.object(meeting, "SOON", 0.1):
        found = agreed(lambda: _until_it_is_found(step), RuntimeError)
    assert all("at step 2 of" in said and "at step 0 of" in said for said in found), found


@on_ranks(2)
def test_a_change_of_all_is_compared_at_once(rank: int) -> None:
    inner = _net()
    step = _training(_replicated(inner))
    step()
    for recipe, met in (("nvfp4()", 1), ("nvfp4()", 0)):
        dist.barrier()  # or a rank that is late would be told of a change in the step before
        inner[2].recipe = recipe  # type: ignore[index]
        with (
            mock.patch.object(meeting, "SOON", 60.0),
            mock.patch.object(meeting, "meet", wraps=meeting.meet) as seen,
            collectives() as sent,
        ):
            step()
        assert seen.call_count == met, seen.call_args_list
        assert not [c for c in sent if c == COMPARED]
    dist.barrier()
    inner[2].recipe = ("mxfp8", OTHER)[rank]  # type: ignore[index]
    before = [p.detach().clone() for p in inner.parameters()]
    with mock.patch.object(meeting, "SOON", 60.0):
        found = agreed(step, RuntimeError)
    assert all(", and rank 1 has [2: Linear" in said for said in found), found
    assert equal(before, inner.parameters())


@on_ranks(2)
def test_nobody_is_asked_in_each_step(rank: int) -> None:
    step = _training(_replicated(_net()))
    step()
    with mock.patch.object(alike, "OFTEN", 1000.0), mock.patch.object(meeting, "job_store", None):
        step()


PLAN = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}


def _parallel(recipe: Any = "mxfp8") -> Any:
    return parallelize_module(_net(recipe), init_device_mesh("cpu", (2,)), PLAN)  # type: ignore[arg-type]


def _gathered(recipe: Any = "mxfp8") -> Any:
    return fully_shard(_net(recipe, weights="high_precision"))


def _compiled() -> Any:
    net = _parallel()
    for layer in (net[0], net[2]):
        layer.note_pass(traced=True, shared=True)  # which is all that a compiler runs as it traces
    return net


def _as_on_gpus(make: Any = None) -> Any:
    """Have no pass compare what is known."""
    return mock.patch.object(model_check, "FREE", ("cpu",) if make is _compiled else ())


def _kept(change: Callable[[], None]) -> None:
    """Make a change on this rank alone."""
    with mock.patch.object(meeting, "limit", return_value=0.1), pytest.warns(UserWarning, match="keeps the former one"):
        change()


@on_ranks(2)
def test_what_travels_changes_together(rank: int) -> None:
    """A rank alone goes on as the others do. All raise before an optimizer writes; when that is mended, all go on."""
    for make in (_gathered, _parallel, _compiled):
        with _as_on_gpus(make):
            net = make()
            step = _training(net)
            step()
            before = [p.to_local().clone() for p in net.parameters()]
            if rank == 1:
                _kept(lambda: setattr(net[2], "recipe", OTHER))  # noqa: B023
                with mock.patch.object(meeting, "limit", return_value=60.0):  # the others wait: no second time
                    net[0].recipe = OTHER
                assert net[2].recipe == net[0].recipe == lpq.recipe("mxfp8")
            for said in agreed(step, RuntimeError):
                assert "the ranks do not have the same model: rank 0 has [0: Linear" in said, said
                assert f"which rank 1 was to change to {lpq.recipe(OTHER).text} without all others" in said, said
            assert equal(before, [p.to_local() for p in net.parameters()])
            for layer in (net[0], net[2]):
                layer.recipe = "mxfp8"
            step()


@on_ranks(2)
def test_what_travels_is_right_where_all_change(rank: int) -> None:
    """As in a model that had the recipe from the beginning. A rank that comes later is waited for."""
    for make in (_gathered, _parallel):
        with _as_on_gpus():
            net, twin = make(), make(OTHER)
            _training(net)()
            net.zero_grad()
            with torch.no_grad():
                for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
                    theirs.to_local().copy_(ours.to_local())
            time.sleep(0.5 * rank)
            for layer in (net[0], net[2]):
                layer.recipe = OTHER
            assert net[0].recipe == net[2].recipe == lpq.recipe(OTHER)
            for one in (net, twin):
                _training(one)()
            pairs = zip(net.parameters(), twin.parameters(), strict=True)
            assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


@on_ranks(2)
def test_a_step_of_what_travels(rank: int) -> None:
    rules = [{"match": "*", "recipe": "mxfp8", "until": 1}, {"match": "*", "recipe": OTHER}]
    for make in (_gathered, _parallel):
        with _as_on_gpus(), mock.patch.object(meeting, "limit", return_value=60.0):
            net = make({"rules": rules})
            step = _training(net)
            for number in range(3):
                lpq.set_step(net, number)
                step()
            assert net[0].recipe == lpq.recipe(OTHER)
            if rank == 1:
                _kept(lambda: lpq.set_step(net, 0))  # noqa: B023
            found = agreed(step, RuntimeError)
            assert all("at step 2 of" in said and "at step 0 of" in said for said in found), found


@on_ranks(2)
def test_without_an_optimizer(rank: int) -> None:
    """The ranks evaluate on by what they had, and compare when they train."""
    net = _gathered()
    step = _training(net)
    with torch.no_grad():
        before = net(X)
        if rank == 1:
            _kept(lambda: setattr(net[0], "recipe", OTHER))
        assert torch.equal(net(X), before)
    found = agreed(step, RuntimeError)
    assert all("which rank 1 was to change to" in said for said in found), found


class _Towers(nn.Module):
    """A model of which not every rank runs each layer in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.seldom = nn.Linear(64, 64), lpq.nn.Linear(64, 64, recipe="mxfp8")

    def forward(self, x: Tensor, every: bool) -> Tensor:
        y = self.common(x)
        return self.seldom(y) if every else y  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_layer_that_one_rank_does_not_run(rank: int) -> None:
    net: Any = _Towers()
    lpq.convert(net, {"rules": [{"match": "seldom", "recipe": "mxfp8"}]})
    net = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with mock.patch.object(meeting, "SOON", 0.1), mock.patch.object(meeting, "PATIENCE", 0.1):
        for every in (rank == 0, True, rank == 1):
            net(X, every).sum().backward()
            optimizer.step()
        meetings: list[int] = []
        while not meetings or (meetings[-1] and len(meetings) < 10):  # until they have met, which takes one more step
            with mock.patch.object(meeting, "meet", wraps=meeting.meet) as seen:
                net(X, True).sum().backward()
                optimizer.step()
            meetings.append(seen.call_count)
    assert not meetings[-1]


@pytest.mark.parametrize("weights", [None, "high_precision"])
def test_a_process_that_imitates_ranks_looks_for_none(weights: Any) -> None:
    """torch's backend for trials has a store that keeps nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        net = fully_shard(_net(weights=weights))
        step = _training(net)
        for recipe in ("mxfp8", OTHER):
            net[0].recipe = recipe
            step()
            assert net[0].recipe == lpq.recipe(recipe)
    finally:
        dist.destroy_process_group()
