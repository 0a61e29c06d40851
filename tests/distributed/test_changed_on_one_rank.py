"""A recipe that one rank alone has changed, once all had compared: all raise, and a step has no further collective.
Where bytes that travel follow from the recipe, that rank keeps the former one until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from differing import SAID, X, compares, net, parallel, replicated, training
from ranks import agreed, fully_shard, imitated_ranks, on_ranks
from support.comparing import equal
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq.distributed import alike, meeting

OTHER = "fp8-row"
Step = Callable[[], Any]


def _found(step: Step) -> list[str]:
    """The errors of all ranks, in some later step."""

    def until_it_is_found() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            step()

    with mock.patch.object(meeting, "SOON", 0.1), mock.patch.object(alike, "OFTEN", 0.1):
        return agreed(until_it_is_found, RuntimeError)


def _one_way(recipe: str) -> dict[str, Any]:
    """A policy whose last step that changes a recipe is the first."""
    return {"rules": [{"match": "*", "recipe": "mxfp8", "until": 1}, {"match": "*", "recipe": recipe}]}


@pytest.mark.parametrize(("shared", "recipe"), [(replicated, "fp8-delayed"), (fully_shard, "mxfp8")])
@on_ranks(2)
def test_all_raise(rank: int, shared: Any, recipe: str) -> None:
    inner = net(recipe)
    step = training(shared(inner))
    step()
    if rank == 1:
        inner[2].recipe = OTHER
    for said in _found(step):
        assert f"{SAID}rank 0 has [" in said, said
        assert ", and rank 1 has [2: Linear with a weight [64, 128] of torch.float32" in said, said
        assert said.endswith("alike on all ranks"), said


@on_ranks(2)
def test_a_step_that_one_rank_alone_is_given(rank: int) -> None:
    """After the last one that changes a recipe. While one may still come, ranks compare steps in each step."""
    inner = net(_one_way("nvfp4"))
    step = training(replicated(inner))
    for number in range(3):
        lpq.set_step(inner, number)
        step()
    if rank == 1:
        lpq.set_step(inner, 0)
    found = _found(step)
    assert all("at step 2 of" in said and "at step 0 of" in said for said in found), found


@on_ranks(2)
def test_a_change_of_all_is_compared_at_once(rank: int) -> None:
    inner = net()
    step = training(replicated(inner))
    step()
    for recipe, met in (("nvfp4()", 1), ("nvfp4()", 0)):
        dist.barrier()  # or a rank that is late would be told of a change in the step before
        inner[2].recipe = recipe
        with (
            mock.patch.object(meeting, "SOON", 60.0),
            mock.patch.object(meeting, "meet", wraps=meeting.meet) as seen,
        ):
            assert compares(step) == 0
        assert seen.call_count == met, seen.call_args_list
    dist.barrier()
    inner[2].recipe = ("mxfp8", OTHER)[rank]
    before = [p.detach().clone() for p in inner.parameters()]
    with mock.patch.object(meeting, "SOON", 60.0):
        found = agreed(step, RuntimeError)
    assert all(", and rank 1 has [2: Linear" in said for said in found), found
    assert equal(before, inner.parameters())


@on_ranks(2)
def test_nobody_is_asked_in_each_step(rank: int) -> None:
    step = training(replicated(net()))
    step()
    with mock.patch.object(alike, "OFTEN", 1000.0), mock.patch.object(meeting, "job_store", None):
        step()


def _gathered(recipe: Any = "mxfp8") -> Any:
    return fully_shard(net(recipe, weights="high_precision"))


def _compiled() -> Any:
    made = parallel()
    for layer in (made[0], made[2]):
        layer.note_pass(traced=True, shared=True)  # which is all that a compiler runs as it traces
    return made


@contextmanager
def _as_on_gpus(make: Any = None) -> Iterator[None]:
    """Have no pass compare what is known, and each step look for changes: a rank waits for less time than usual."""
    free = mock.patch.object(meeting, "FREE", ("cpu",) if make is _compiled else ())
    with free, mock.patch.object(alike, "OFTEN", 0.0):
        yield


def _limit(seconds: float) -> Any:
    return mock.patch.object(meeting, "limit", return_value=seconds)


def _kept(change: Callable[[], None]) -> None:
    """Make a change on this rank alone."""
    with _limit(0.1), pytest.warns(UserWarning, match="keeps the former one"):
        change()


@pytest.mark.parametrize("make", [_gathered, parallel, _compiled])
@on_ranks(2)
def test_what_travels_changes_together(rank: int, make: Any) -> None:
    """A rank alone goes on as the others do. All raise before an optimizer writes; when that is mended, all go on."""
    with _as_on_gpus(make):
        made = make()
        step = training(made)
        step()
        before = [p.to_local().clone() for p in made.parameters()]
        if rank == 1:
            _kept(lambda: setattr(made[2], "recipe", OTHER))
            with _limit(60.0):  # the others wait: no second time
                made[0].recipe = OTHER
            assert made[2].recipe == made[0].recipe == lpq.recipe("mxfp8")
        for said in agreed(step, RuntimeError):
            assert f"{SAID}rank 0 has [0: Linear" in said, said
            assert f"which rank 1 was to change to {lpq.recipe(OTHER).text} without all others" in said, said
        assert equal(before, [p.to_local() for p in made.parameters()])
        for layer in (made[0], made[2]):
            layer.recipe = "mxfp8"
        step()


@pytest.mark.parametrize("make", [_gathered, parallel])
@on_ranks(2)
def test_what_travels_is_right_where_all_change(rank: int, make: Any) -> None:
    """As in a model that had the recipe from the beginning. A rank that comes later is waited for."""
    with _as_on_gpus():
        made, twin = make(), make(OTHER)
        training(made)()
        made.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(made.parameters(), twin.parameters(), strict=True):
                theirs.to_local().copy_(ours.to_local())
        time.sleep(0.5 * rank)
        for layer in (made[0], made[2]):
            layer.recipe = OTHER
        assert made[0].recipe == made[2].recipe == lpq.recipe(OTHER)
        for one in (made, twin):
            training(one)()
        assert equal(*([p.to_local() for p in one.parameters()] for one in (made, twin)))


@pytest.mark.parametrize("make", [_gathered, parallel])
@on_ranks(2)
def test_a_step_of_what_travels(rank: int, make: Any) -> None:
    with _as_on_gpus(), _limit(60.0):
        made = make(_one_way(OTHER))
        step = training(made)
        for number in range(3):
            lpq.set_step(made, number)
            step()
        assert made[0].recipe == lpq.recipe(OTHER)
        if rank == 1:
            _kept(lambda: lpq.set_step(made, 0))
        found = agreed(step, RuntimeError)
        assert all("at step 2 of" in said and "at step 0 of" in said for said in found), found


@on_ranks(2)
def test_without_an_optimizer(rank: int) -> None:
    """The ranks evaluate on by what they had, and compare when they train."""
    made = _gathered()
    step = training(made)
    with torch.no_grad():
        before = made(X)
        if rank == 1:
            _kept(lambda: setattr(made[0], "recipe", OTHER))
        assert torch.equal(made(X), before)
    assert all("which rank 1 was to change to" in said for said in agreed(step, RuntimeError))


@pytest.mark.parametrize("make", [_gathered, parallel])
@on_ranks(2)
def test_no_pass_waits_for_ranks_that_miss_each_other_at_a_step(rank: int, make: Any) -> None:
    """Each has waited there in vain. Both go on, and raise at the next step."""
    with _as_on_gpus():
        made = make()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.01)
        step = training(made)
        step()
        if rank == 1:
            _kept(lambda: setattr(made[2], "recipe", OTHER))
        made(X).sum().backward()
        for own in (1, 0):
            if rank == own:
                with mock.patch.object(meeting, "SOON", 0.1):
                    optimizer.step()
            dist.barrier()
        with _limit(10.0):
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
    made: Any = lpq.convert(_Towers(), {"rules": [{"match": "seldom", "recipe": "mxfp8"}]})
    made = DistributedDataParallel(made, find_unused_parameters=True)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)

    def step(every: bool) -> None:
        made(X, every).sum().backward()
        optimizer.step()

    with mock.patch.object(meeting, "SOON", 0.1), mock.patch.object(meeting, "PATIENCE", 0.1):
        for every in (rank == 0, True, rank == 1):
            step(every)
        meetings: list[int] = []
        while not meetings or (meetings[-1] and len(meetings) < 10):  # until they have met, which takes one more step
            with mock.patch.object(meeting, "meet", wraps=meeting.meet) as seen:
                step(True)
            meetings.append(seen.call_count)
    assert not meetings[-1]


@pytest.mark.parametrize("weights", [None, "high_precision"])
def test_a_process_that_imitates_ranks_looks_for_none(weights: Any) -> None:
    with imitated_ranks():
        made = fully_shard(net(weights=weights))
        step = training(made)
        for recipe in ("mxfp8", OTHER):
            made[0].recipe = recipe
            step()
            assert made[0].recipe == lpq.recipe(recipe)
