"""Statistics of a run that a GPU replays: they are what the functions themselves return, and the run stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.observe.numerics import Numerics
from lpq.observe.replays import Replays

RECIPES = [
    "fp8-current", "fp8-delayed", "mxfp8", "nvfp4", "nvfp4-eden", "mxfp4", "mxfp8-one-copy",
    "x=nvfp4(search=mse), w=nvfp4(search=four_over_six), dy=nvfp4()", "fprop=nvfp4, dgrad=mxfp8, wgrad=fp8()",
]  # fmt: skip
LAYERS, STEPS = 4, 3


class Direct(Replays):
    """Replays nothing."""

    def __call__(self, function: Any, what: Any, tensors: Sequence[Tensor]) -> Any:
        return function(what, tensors)


class Beside(Replays):
    """Compares what is replayed with what the function returns."""

    def __call__(self, function: Any, what: Any, tensors: Sequence[Tensor]) -> Any:
        expected = function(what, tensors)
        found = super().__call__(function, what, tensors)
        for one, other in zip(found, expected, strict=True):
            assert one is None or torch.allclose(one, other.to(one), rtol=1e-4, atol=1e-4, equal_nan=True)
        return found


def model(recipe: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(*(nn.Linear(256, 256) for _ in range(LAYERS))).cuda().bfloat16(), recipe)


def train(net: Any, watch: Numerics | None = None, run: Any = None) -> list[Tensor]:
    """Train for some steps, each with the same batch and random bits; return the weights and the bits' state."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        with nullcontext() if watch is None else watch.step():
            (run or net)(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*net.state_dict().values(), torch.cuda.get_rng_state()]


def watch_of(net: Any, replays: Replays, **options: Any) -> Numerics:
    watch = lpq.observe.numerics(net, every=1, rows=128, **options)
    watch._replays = replays
    return watch


def graphs(replays: Replays) -> list[bool]:
    return [one._graph is not None for one in replays._recordings.values()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_replayed(recipe: str) -> None:
    """One graph for x, for w and for dy serves all layers and steps, and the run's bits stay as they are."""
    net, alone, replays = model(recipe), model(recipe), Beside()
    found, expected = train(net, watch_of(net, replays)), train(alone)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert graphs(replays) == [True] * 3


def test_another_recipe_is_asked_about_and_forwards_run_again() -> None:
    net, replays = model("mxfp8"), Beside()
    watch = watch_of(net, replays, what_if="nvfp4")
    train(net, watch, lambda x: checkpoint(net, x, use_reentrant=False))
    assert all(graphs(replays))
    assert len(watch.readings()) == STEPS * LAYERS * 7 * 2


def test_readings_are_those_without_replays() -> None:
    found = []
    for replays in (Replays(), Direct()):
        net = model("nvfp4")
        watch = watch_of(net, replays)
        train(net, watch)
        found.append(watch.readings())
    assert len(found[0]) == STEPS * LAYERS * 7
    for one, other in zip(*found, strict=True):
        assert one.title == other.title
        assert one.numbers() == pytest.approx(other.numbers(), rel=1e-3, abs=1e-5)


def test_nothing_waits_for_the_device_once_graphs_are_there() -> None:
    net = model("nvfp4")
    watch = watch_of(net, Replays())
    train(net, watch)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with watch.step():
            net(x).float().square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(watch.readings()) == (STEPS + 1) * LAYERS * 7


def of_host(what: Any, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] * tensors[0].sum().item()


def table(what: Any, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] * torch.tensor([1.0, 2.0], device="cuda")


def sums(what: Any, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].cumsum(0) + tensors[1]


@pytest.mark.parametrize(("function", "operator"), [(of_host, "_local_scalar_dense"), (table, "lift_fresh")])
def test_a_function_that_needs_the_host_is_called_and_said(function: Any, operator: str) -> None:
    replays, given = Replays(), [torch.tensor([3.0, float(number)], device="cuda") for number in range(4)]
    with pytest.warns(UserWarning, match=operator) as said:
        found = [replays(function, "what", [x]) for x in given]
    assert all(torch.equal(one, function("what", [x])) for one, x in zip(found, given, strict=True))
    assert len(said) == 1
    assert graphs(replays) == [False]


def test_each_kind_of_arguments_has_a_graph_and_graphs_share_their_memory() -> None:
    replays = Replays()
    side = torch.cuda.Stream()
    for number in range(6):
        for size in (3, 1000):
            given = [torch.full((size,), float(number), device="cuda"), torch.tensor(number, device="cuda")]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
                found = replays(sums, "what", given).clone()
            torch.cuda.current_stream().wait_stream(side)
            assert torch.equal(found, sums("what", given))
    assert graphs(replays) == [True, True]


def test_a_graph_that_a_user_records_has_the_statistics_in_it() -> None:
    """A call while another graph is recorded records no graph inside."""
    replays, x = Replays(), torch.ones(5, device="cuda")
    for _ in range(3):
        replays(sums, "what", [x, x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = replays(sums, "what", [x, x])
    x.fill_(2.0)
    graph.replay()
    assert torch.equal(found, sums("what", [x, x]))
