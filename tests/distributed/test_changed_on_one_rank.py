"""A recipe that one rank alone has changed, once all had compared: the others do not wait, and a step has no further
collective. Where nothing of lpq travels all raise; where something does, the one that changed it says so, after a
while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from agreed import COMPARED, agreed
from ranks import fully_shard, spawn
from support.comparing import equal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

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


def _all_raise(rank: int) -> None:
    for shared in (_replicated, fully_shard):
        for recipe in ("mxfp8", "fp8-delayed"):
            inner = _net(recipe)
            step = _training(shared(inner))
            step()
            if rank == 1:
                inner[2].recipe = OTHER  # type: ignore[index]
            with mock.patch.object(model_check, "SOON", 0.1):
                found = agreed(lambda: _until_it_is_found(step), RuntimeError)  # noqa: B023
            for said in found:
                assert "the ranks do not have the same model: rank 0 has [" in said, said
                assert ", and rank 1 has [2: Linear with a weight [64, 128] of torch.float32" in said, said
                assert said.endswith("alike on all ranks"), said


def _a_step_that_one_rank_alone_is_given(rank: int) -> None:
    """After the last one that changes a recipe. While one may still come, ranks compare steps in each step."""
    rules = [{"match": "*", "recipe": "mxfp8", "until": 1}, {"match": "*", "recipe": "nvfp4"}]
    inner = _net({"rules": rules})
    step = _training(_replicated(inner))
    for number in range(3):
        lpq.set_step(inner, number)
        step()
    if rank == 1:
        lpq.set_step(inner, 0)
    with mock.patch.object(model_check, "SOON", 0.1):
        found = agreed(lambda: _until_it_is_found(step), RuntimeError)
    assert all("at step 2 of" in said and "at step 0 of" in said for said in found), found


def _a_change_of_all_is_compared_at_once(rank: int) -> None:
    inner = _net()
    step = _training(_replicated(inner))
    step()
    for recipe, met in (("nvfp4()", 1), ("nvfp4()", 0)):
        dist.barrier()  # or a rank that is late would be told of a change in the step before
        inner[2].recipe = recipe  # type: ignore[index]
        with (
            mock.patch.object(model_check, "SOON", 60.0),
            mock.patch.object(meeting, "meet", wraps=meeting.meet) as seen,
            collectives() as sent,
        ):
            step()
        assert seen.call_count == met, seen.call_args_list
        assert not [c for c in sent if c == COMPARED]
    dist.barrier()
    inner[2].recipe = ("mxfp8", OTHER)[rank]  # type: ignore[index]
    before = [p.detach().clone() for p in inner.parameters()]
    with mock.patch.object(model_check, "SOON", 60.0):
        found = agreed(step, RuntimeError)
    assert all(", and rank 1 has [2: Linear" in said for said in found), found
    assert equal(before, inner.parameters())


def _nobody_is_asked_in_each_step(rank: int) -> None:
    step = _training(_replicated(_net()))
    step()
    with mock.patch.object(alike, "OFTEN", 1000.0), mock.patch.object(meeting, "job_store", None):
        step()


def _the_one_that_changed_says_so(rank: int) -> None:
    """Where the others would wait for other bytes. When they have changed it, too, all go on."""
    plan: dict[str, Any] = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}
    gathered: Any = fully_shard(_net(weights="high_precision"))
    mesh = init_device_mesh("cpu", (2,))
    parallel: Any
    compiled: Any
    parallel, compiled = (parallelize_module(_net(), mesh, plan) for _ in range(2))
    with mock.patch.object(model_check, "FREE", ()):  # as on GPUs, where no pass compares what is known
        for net in (gathered, parallel, compiled):

            def call(net: Any = net) -> None:
                if net is compiled:
                    net[0].note_pass(traced=True, shared=True)  # which is all that a compiler runs as it traces
                else:
                    net(X).sum().backward()

            call()
            if rank == 1:
                net[0].recipe = OTHER
                with (
                    mock.patch.object(meeting, "limit", return_value=0.1),
                    pytest.raises(RuntimeError, match=r"waited 0 s .* changed on this rank alone"),
                ):
                    call()
            dist.barrier()
            if rank == 0:
                net[0].recipe = OTHER
            call()


class _Towers(nn.Module):
    """A model of which not every rank runs each layer in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.seldom = nn.Linear(64, 64), lpq.nn.Linear(64, 64, recipe="mxfp8")

    def forward(self, x: Tensor, every: bool) -> Tensor:
        y = self.common(x)
        return self.seldom(y) if every else y  # type: ignore[no-any-return]


def _a_layer_that_one_rank_does_not_run(rank: int) -> None:
    net: Any = _Towers()
    lpq.convert(net, {"rules": [{"match": "seldom", "recipe": "mxfp8"}]})
    net = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with mock.patch.object(model_check, "SOON", 0.1), mock.patch.object(model_check, "PATIENCE", 0.1):
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


@pytest.mark.parametrize(
    "check",
    [
        _all_raise, _a_step_that_one_rank_alone_is_given, _a_change_of_all_is_compared_at_once,
        _nobody_is_asked_in_each_step, _the_one_that_changed_says_so, _a_layer_that_one_rank_does_not_run,
    ],
)  # fmt: skip
def test_two_ranks(check: Callable[[int], None]) -> None:
    spawn(check, 2)
