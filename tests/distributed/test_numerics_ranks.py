"""``lpq.observe.numerics`` where ranks share a model: each has the statistics of all, as one process finds them."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import agreed, fully_shard, mesh_of, of_all, on_one, on_ranks
from support.small_models import Experts, Gated, gated_plan
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq.distributed import meeting
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.observe.readings import NumericsError

WIDTH, INNER, BATCH, TOKENS, RANKS = 64, 256, 2, 64, 2
Found = dict[str, dict[str, float]]


def model(recipe: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return lpq.convert(Gated(WIDTH, INNER), recipe, **options)


def data(batch: int = BATCH) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(batch, TOKENS, WIDTH, generator=draw) for _ in range(2))  # type: ignore[return-value]


def watched(net: Any, *batches: tuple[Tensor, Tensor]) -> Found:
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        for x, dy in batches:
            net(x).backward(dy)
    return {one.title: one.numbers() for one in watch.readings()}


def one_process(recipe: str, batches: int) -> Found:
    return watched(model(recipe), *zip(*(t.chunk(batches) for t in data()), strict=True))


def alike(found: Found, expected: Found, leaving: tuple[str, ...] = (), share: float = 1e-3) -> None:
    assert found.keys() == {title for title in expected if not title.endswith(leaving)}
    for title, numbers in found.items():
        assert numbers == pytest.approx({name: expected[title][name] for name in numbers}, rel=share, abs=share), title


def batches_of(ranks: int) -> list[tuple[Tensor, Tensor]]:
    """A batch of each rank, with an outlier in the last one."""
    x, dy = data(ranks)
    x[-1, 3, 5] = 50.0
    return [*zip(x.chunk(ranks), dy.chunk(ranks), strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("recipe", "weights"), [("fp8-current", None), ("mxfp8", "high_precision"), ("fp8-current", "high_precision")]
)
@on_ranks()
def test_ranks_of_fsdp2_have_the_statistics_of_all(rank: int, ranks: int, recipe: str, weights: Any) -> None:
    """Four are 2 x 2: replicas tell of the same weights and of inputs of their own."""
    net = model(recipe, weights=weights, ranks=None if weights is None else 2)
    fully_shard(net, mesh=mesh_of("replicate", "shard") if ranks == 4 else mesh_of())
    found = watched(net, batches_of(ranks)[rank])
    alike(found, on_one(lambda: watched(model(recipe), *batches_of(ranks))))
    assert len(found) == 3 * 7
    for one in of_all(found):
        assert one == found


@on_ranks(RANKS)
def test_replicas_have_the_statistics_of_all_by_their_wrapper(rank: int) -> None:
    """By the module inside of it each rank would have its own, and write them to the file of all."""
    net = model("mxfp8")
    run: Any = DistributedDataParallel(net)
    alike(watched(run, batches_of(RANKS)[rank]), on_one(lambda: watched(model("mxfp8"), *batches_of(RANKS))))
    watch = lpq.observe.numerics(net, every=1)
    with (
        pytest.raises(NumericsError, match=r"numerics: the model is inside of a Distr.*: give the Distr"),
        watch.step(),
    ):
        run(batches_of(RANKS)[rank][0])
    with pytest.raises(NumericsError, match=r"the replay: the model is inside of a Distr.*: give the Distr"):
        lpq.observe.culprits(net, lambda: run(batches_of(RANKS)[rank][0]).sum())
    net(batches_of(RANKS)[rank][0])  # control: a pass of this rank alone


@on_ranks(RANKS)
def test_weights_that_are_stored_quantized_have_no_line(rank: int) -> None:
    net = model("mxfp8", weights="quantized", ranks=RANKS)
    fully_shard(net)
    found = watched(net, tuple(t[rank : rank + 1] for t in data()))  # type: ignore[arg-type]
    assert {title.split(".")[1] for title in found} == {"x", "dy", "dw"}


@pytest.mark.parametrize(
    ("recipe", "sequence"), [("fp8-delayed", False), ("mxfp8", False), ("mxfp8", True), ("mxfp8-one-copy", False)]
)
@on_ranks(RANKS)
def test_ranks_of_tensor_parallelism_have_the_statistics_of_the_whole(rank: int, recipe: str, sequence: bool) -> None:
    net = parallelize_module(model(recipe), mesh_of(), gated_plan(sequence))
    found = watched(net, tuple(t.chunk(RANKS, 1)[rank] if sequence else t for t in data()))  # type: ignore[arg-type]
    alike(found, on_one(one_process, recipe, 1), ("dw",) if sequence else ())


def _of_experts(net: Any, rows: list[Tensor], dy: list[Tensor]) -> Found:
    """The statistics of a step with these rows of each expert."""
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        net(torch.cat(rows), torch.tensor([*map(len, rows)]).cumsum(0, dtype=torch.int32)).backward(torch.cat(dy))
    return {one.title: one.numbers() for one in watch.readings()}


@on_ranks(RANKS)
def test_ranks_with_experts_have_the_statistics_of_all_experts(rank: int) -> None:
    """Each has other experts, of which one has no rows, and sends its rows to them."""
    sizes = [6, 2, 0, 4]
    halves = [tuple(t.flatten(0, 1)[12 * r : 12 * r + 12].split(sizes) for t in data()) for r in range(RANKS)]
    whole = [[torch.cat(parts) for parts in zip(*each, strict=True)] for each in zip(*halves, strict=True)]
    net = parallelize_module(Experts(4, WIDTH, INNER, recipe="mxfp8"), mesh_of(), ExpertParallel())
    found = _of_experts(net, *map(list, halves[rank]))
    alike(found, on_one(lambda: _of_experts(Experts(4, WIDTH, INNER, recipe="mxfp8"), *whole)))
    assert len(found) == 2 * 7
    for one in of_all(found):
        assert one == found


@on_ranks(RANKS)
def test_a_step_that_one_rank_alone_watches(rank: int) -> None:
    """It goes on without statistics, as do the others; where ranks then watch different steps at once, all raise."""
    net = fully_shard(model("mxfp8", weights="high_precision", ranks=RANKS))
    x, dy = (t[rank : rank + 1] for t in data())
    watch = lpq.observe.numerics(net, every=1)
    _watch(watch, net, x, dy)
    if rank:
        net(x).backward(dy)
    else:
        warned = pytest.warns(UserWarning, match=r"watched step 1, and not all ranks .* have come")
        with mock.patch.object(meeting, "PATIENCE", 0.2), warned:
            _watch(watch, net, x, dy)
    net(x).backward(dy)  # of the next step, in which nothing waits
    assert {one.step for one in watch.readings()} == {0}
    said = agreed(lambda: _watch(watch, net, x, dy))
    assert said[0].startswith("RuntimeError: numerics: the ranks do not watch the same step: rank 0 has [step 2], and ")
    assert len({*said}) == 1


def _watch(watch: Any, net: Any, x: Tensor, dy: Tensor) -> None:
    with watch.step():
        net(x).backward(dy)


@on_ranks(RANKS)
def test_ranks_that_watch_otherwise_are_refused(rank: int) -> None:
    """Other layers, or in other steps or by another recipe, of which sums of other sizes would be added up."""
    net = fully_shard(model("mxfp8"))
    ways: tuple[tuple[str, list[Any], str, str], ...] = (
        ("layers", ["left", "down"], "left", "down"),
        ("every", [1, 2], "every=1, rows=256, step=0, what_if=None", "every=2, rows=256, step=0, what_if=None"),
        ("step", [0, 1], "every=100, rows=256, step=0, what_if=None", "every=100, rows=256, step=1, what_if=None"),
        ("what_if", [None, "mxfp8"], "every=100, rows=256, step=0, what_if=None", "what_if=mxfp8()"),
    )
    for option, values, first, second in ways:
        words = rf"rank 0 has \[{re.escape(first)}\], and rank 1 has \[.*{re.escape(second)}\]"
        with pytest.raises(RuntimeError, match=f"the ranks do not watch the same: {words}"):
            lpq.observe.numerics(net, **{option: values[rank]})


@on_ranks(RANKS)
def test_statistics_of_a_step_are_reduced_in_one_collective(rank: int) -> None:
    """A NaN of one rank is not lost in it."""
    net, (x, dy) = model("mxfp8"), data()
    fully_shard(net)
    watch = lpq.observe.numerics(net, every=1)
    with lpq.observe.collectives() as seen, watch.step():
        net(x * (torch.nan if rank else 1)).backward(dy)
    assert [one.kind for one in seen].count("all_reduce") == 1
    assert {one.tensor: one.amax is None for one in watch.readings() if one.tensor != "dw"} == {
        "x": True, "w": False, "dy": False
    }  # fmt: skip
