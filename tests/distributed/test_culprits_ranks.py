"""Which layer did it, where ranks share the model: all of them find the same one, and all promote it; and a search in
such a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import agreed, fully_shard, mesh_of, of_all, on_one, on_ranks
from support.small_models import Planted
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from lpq.integrations.transformers_culprits import _Culprits
from lpq.observe.replay import gradient_norm
from lpq.torch_private.tensors import local_part


def planted(recipe: str, **how: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        return lpq.convert(nn.Sequential(*(Planted(64, i == 2) for i in range(4))), recipe, **how)


def sharded(net: Any) -> Any:
    """Over two ranks; four are two replicas of two shards."""
    mesh = mesh_of("replicate", "shard") if dist.get_world_size() == 4 else mesh_of()
    for block in (*net, net):
        fully_shard(block, mesh=mesh)
    return net


def closure_of(net: Any, rank: int) -> Callable[[], Tensor]:
    """A step of this rank's own batch."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))

    def closure() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


@pytest.mark.parametrize(("ranks", "weights"), [(2, None), (2, "quantized"), (4, "high_precision")])
@on_ranks()
def test_ranks_of_fsdp2_find_a_planted_layer(rank: int, ranks: int, weights: Any) -> None:
    """The same layer is found on all, by the same numbers."""
    net = sharded(planted("nvfp4", weights=weights, ranks=None if weights is None else 2))
    closure = closure_of(net, rank)
    torch.manual_seed(rank)
    before = lpq.observe.Before(net)
    closure()
    gradients = [local_part(p.grad).clone() for p in net.parameters() if p.grad is not None]
    found = lpq.observe.culprits(net, closure, before=before, most=1)
    assert found.replays
    assert [one.layer for one in found.found] == ["2.layer"]
    assert found.found[0].moved > 0.3
    assert {part.part for part in found.parts} >= {"fprop", "fprop.x"}
    assert {*of_all(str(found))} == {str(found)}
    now = [local_part(p.grad) for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(now, gradients, strict=True))
    assert net[2].layer.recipe == net[0].layer.recipe == lpq.recipe("nvfp4")
    course = lpq.observe.Course(2, least=2)
    assert [course.leaves(10 * found.loss, 1e-9) for _ in range(2)] == [None] * 2
    as_well = lpq.observe.culprits(net, closure, before=before, course=course)
    assert (as_well.off_in_bf16 or "").startswith("the gradient norm is ")
    assert {*of_all(str(as_well))} == {str(as_well)}
    found.promote(net, until=3)
    for step in (2, 3):
        lpq.set_step(net, step)
        assert (net[2].layer.recipe == found.found[0].recipe) == (step == 2)
        closure()


class WithLoss(nn.Module):
    """A planted model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = planted("mxfp8")

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.net(x).square().mean(),)


@pytest.mark.parametrize("way", ["fsdp2", "ddp"])
@on_ranks(2)
def test_the_callback_has_the_norm_of_all_ranks_before_clipping(rank: int, way: str) -> None:
    """Two passes add up gradients: the norm is taken when the last one is complete."""
    net = WithLoss()
    run: Any = nn.parallel.DistributedDataParallel(net) if way == "ddp" else fully_shard(net)
    callback, state, seen = _Culprits(), SimpleNamespace(global_step=0, stateful_callbacks={}), list[Any]()
    callback._trigger.look = lambda *given: seen.append(given)  # type: ignore[assignment, func-returns-value]
    callback.on_train_begin(None, state, None, net)
    for step in range(2):
        callback.on_step_begin(None, state, None, net)
        for part in range(2):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4 * step + 2 * part + rank))
            (run(x)[0] / 2).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-6)
        callback.on_pre_optimizer_step(None, state, None, net)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert seen[-1][3] == float(whole) > 1e-3
        net.zero_grad()
    assert {*of_all(str([one[2:4] for one in seen]))} == {str([one[2:4] for one in seen])}


class OffInSecond(lpq.observe.Course):
    """A course that the second step leaves."""

    def off(self, loss: float, norm: float | None = None) -> str | None:
        return super().off(loss, norm) or ("planted" if len(self._losses) == 2 else None)


@on_ranks(2)
def test_the_callback_replays_the_batches_of_all_replicas(rank: int) -> None:
    """Each rank by itself finds the layer that gets outliers from its own batches alone."""
    torch.manual_seed(0)
    net = WithLoss()
    net.net = lpq.convert(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), "nvfp4")
    run: Any = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)

    def plant(layer: nn.Module, args: tuple[Tensor]) -> Tensor:
        return args[0] * torch.where(torch.arange(64) % 16 == 0, 1e3, 1.0)

    net.net[rank].register_forward_pre_hook(plant)
    callback = _Culprits(course=OffInSecond(), promote=2, most=1, least=0.0)
    state = SimpleNamespace(global_step=0, stateful_callbacks={})
    callback.on_train_begin(None, state, None, net)
    for state.global_step in range(3):
        lpq.set_step(run, state.global_step)
        callback.on_step_begin(None, state, None, net)
        for part in range(2):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * part + rank))
            with run.no_sync() if part == 0 else nullcontext():
                (run(x)[0] / 2).backward()
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the culprits
            callback.on_pre_optimizer_step(None, state, None, net)
        now = [p.grad for p in net.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(now, gradients, strict=True))
        net.zero_grad()
    (found,) = callback.found.values()
    assert [one.layer in ("net.0", "net.1") for one in found.found] == [True]  # as rules name it
    assert {*of_all(str(found))} == {str(found)}
    promoted = [layer.recipe == lpq.recipe("bf16") for layer in net.net]
    assert sum(promoted) == 1
    assert {*of_all(str(promoted))} == {str(promoted)}


@on_ranks(2)
def test_gradients_in_buckets_of_replicas_are_as_before(rank: int) -> None:
    """Every backward writes to the memory in which they lie, also the replay's."""
    net = planted("nvfp4")
    run: Any = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    for _ in range(2):  # the first backward orders the buckets anew
        net.zero_grad()
        before = lpq.observe.Before(run)
        closure = closure_of(run, rank)
        closure()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    assert lpq.observe.culprits(run, closure, before=before, most=1).replays
    now = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(now, gradients, strict=True))
    now[0].mul_(2)
    assert lpq.observe.culprits(run, closure, before=before, most=1).replays is False


@on_ranks(2)
def test_a_norm_is_of_gradients_that_are_sharded_and_that_are_not(rank: int) -> None:
    net = planted("mxfp8")
    fully_shard(net[0])
    closure_of(net, 0)()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    assert float(gradient_norm(net)) == pytest.approx(float(torch.cat([g.flatten() for g in whole]).norm()), rel=1e-5)


Numbers = dict[str, float]


def numbers(net: Any, *batches: Tensor) -> Numbers:
    """Replay a step of these batches, and return what the replay finds."""

    def closure() -> Tensor:
        losses = [net(x).square().mean() / len(batches) for x in batches]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum()

    found = lpq.observe.culprits(net, closure, most=1)
    moved = {one.name: one.moved for one in (*found.found, *found.parts)}
    return {"loss": found.loss, "in bf16": found.loss_in_bf16, "error": found.error, **moved}


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks()
def test_ranks_find_what_one_process_finds_of_all_their_batches(rank: int, ranks: int) -> None:
    """In MXFP8 a batch has the same bytes in parts."""
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(32, 64, generator=draw) * (1 + i) for i in range(ranks)]
    found = numbers(sharded(planted("mxfp8")), batches[rank])
    alone = on_one(lambda: numbers(planted("mxfp8"), *batches))
    assert found == pytest.approx(alone, rel=1e-3, abs=1e-3)
    assert "2.layer" in found
    assert found != pytest.approx(
        numbers(planted("mxfp8"), batches[rank]), rel=1e-3, abs=1e-3
    )  # of its own batch alone


@on_ranks(2)
def test_weights_that_are_whole_on_each_rank_count_once(rank: int) -> None:
    """Beside shards, of which each rank has its own."""
    net = planted("mxfp8")
    for block in net[:2]:
        fully_shard(block)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    assert numbers(net, x) == pytest.approx(on_one(lambda: numbers(planted("mxfp8"), x)), rel=1e-5)


@on_ranks(2)
def test_ranks_that_would_replay_otherwise_all_raise(rank: int) -> None:
    """With other options one of them replays more often, and would wait for the other."""
    net = sharded(planted("fp8-current"))
    closure = closure_of(net, rank)
    begins = "RuntimeError: the ranks do not replay the same: rank 0 has ["
    courses = [{"course": lpq.observe.Course(2, least=2)} for _ in range(2)]
    for i, one in enumerate(courses):  # of losses of its own batches
        assert [one["course"].leaves(1e-9 + 1e9 * i) for _ in range(2)] == [None] * 2
    different: Any = [({"most": 1}, {"most": 2}), ({"least": 0.1}, {"least": 0.2}), ({"replays": 1}, {}), courses]
    for option, others in different:
        given: Any = others if rank else option
        said = agreed(lambda: lpq.observe.culprits(net, closure, **given))  # noqa: B023
        assert all(one.startswith(begins) for one in said), said
    given = "a course with losses 1e-09], and rank 1 has [a course with losses 1000000000.0]"
    assert said == [f"{begins}{given}. Call it alike on all of them"] * len(said), (
        "one loss of the last option's window"
    )
    for recipes, closures in ((("nvfp4", "mxfp8"), 1), (("nvfp4", "nvfp4"), 1 + rank)):
        asked: Any = {"recipes": [recipes[rank]], "time": 0.9, "seconds": lambda _, recipe: 1.0 + (recipe is None)}
        said = agreed(lambda: lpq.search(net, [closure] * closures, **asked))  # noqa: B023
        assert all(one.startswith(begins) for one in said), said


@on_ranks(2)
def test_ranks_of_fsdp2_search_as_one(rank: int) -> None:
    """The planted layer's product stays exact, and all ranks have the same errors. Two of the twelve products are not
    made: dgrad of the first layer, and wgrad of the planted one, which is frozen."""
    net = sharded(planted("fp8-current"))
    closure = closure_of(net, rank)

    def seconds(_: str, recipe: Any) -> float:
        return 3.0 if recipe is None else sum(1.0 if a.plain else 0.5 for a, _ in recipe.products.values())

    found = lpq.search(net, [closure, closure], recipes=["nvfp4"], time=7.5 / 12, seconds=seconds)
    exact = [(name, i) for name, one in found.choices.items() for i, text in enumerate(one.products) if text == "bf16"]
    assert exact == [("2.layer", 0), ("2.layer", 2)]
    error = torch.tensor([found.error, -found.error], dtype=torch.float64)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    assert error.sum() == 0
    assert 0 < found.error < found.uniform[0].error / 2
    assert net[2].layer.recipe == lpq.recipe("fp8-current")
