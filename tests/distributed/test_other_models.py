"""Ranks that have other models: all raise at the first gather, or when recipes change, and say what differs where."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from differing import E5M2, OTHER_DY, STAGED, compares, refused
from ranks import agreed, fully_shard, mesh_of, on_ranks
from sharded import How, built, model
from torch import nn

import lpq
from lpq.distributed import alike, meeting
from lpq.observe import collectives

SMALL = {"width": 64, "inner": 256}
X = torch.ones(4, 64)
LAYER = "Linear with a weight [256, 64] of torch.float32"


def _refused(net: nn.Module, *words: str) -> None:
    """At the first gather, before anything is gathered of other sizes."""
    refused(lambda: net(X), *words)


@on_ranks(2)
def test_other_models(rank: int) -> None:
    for recipes, words in (
        (("mxfp8", E5M2), (f"[0.up: {LAYER}", ", recipe mxfp8()]", f", recipe {E5M2}]")),
        (("mxfp8", OTHER_DY), (f", recipe {OTHER_DY}]",)),
        (("fp8-current", "nvfp4"), (", dy=fp8(dtype=e5m2), w.save=weight]", "w=nvfp4(block=16x16)")),
        (("mxfp8", "fp8-delayed"), ("w=fp8(scaling=delayed)",)),
    ):
        _refused(built(How(recipes[rank], **SMALL)), *words)
    _refused(built(How("mxfp8", **SMALL, blocks=2 + rank)), "has [none], and rank 1 has [2.norm: LayerNorm")
    stored = built(How("mxfp8", ("high_precision", "quantized")[rank], **SMALL))
    _refused(stored, f"[0.up: {LAYER}, gathered quantized, recipe", "stored as mxfp8, recipe")
    _refused(built(How("mxfp8", width=64, inner=256 * (1 + rank))), "weight [256, 64]", "weight [512, 64]")
    mixed = built(How("mxfp8", **SMALL, mixed=bool(rank)))
    _refused(mixed, "torch.float32, in high precision", "torch.bfloat16, in high precision")
    biased = lpq.convert(nn.Linear(64, 128, bias=rank == 0), "mxfp8", weights="high_precision", ranks=2)
    _refused(fully_shard(biased), "rank 0 has [bias: [128]], and rank 1 has [none]")
    by_hand = built(How("mxfp8", **SMALL))
    by_hand(X)
    by_hand[1].up.recipe = ("nvfp4", E5M2)[rank]
    _refused(by_hand, "[1.up: ")


@on_ranks(2)
def test_a_layer_that_one_rank_froze(rank: int) -> None:
    """Its gradient would travel from the others alone."""
    for weights in ("high_precision", "quantized", None):
        for name, words in (("0.up.weight", f"[0.up: {LAYER}"), ("1.down.bias", "[1.down.bias: [64]")):
            net = model(**SMALL)
            net.get_parameter(name).requires_grad_(rank == 0)
            lpq.convert(net, "mxfp8", weights=weights)
            _refused(fully_shard(net), words, ", frozen")


@on_ranks(2)
def test_other_steps(rank: int) -> None:
    """As they are before the first gather, and where all change their recipes."""
    net = built(How(STAGED, **SMALL))
    if rank == 0:
        lpq.set_step(net, 0)
    words = f"recipe mxfp8(), at step 0 of (mxfp8 until step 2, then {E5M2})]", "mxfp8(), before lpq.set_step]"
    _refused(net, *words)
    for step in (0, 1):
        lpq.set_step(net, step)
        net(X)
    lpq.set_step(net, 2 + rank)
    _refused(net, "at step 2 of", "at step 3 of")
    lpq.set_step(net, 2)
    net(X)
    lpq.set_step(net, 3)  # which changes no recipe

    def in_each_direction() -> list[int]:
        return [compares(lambda: kept.append(net(X).sum())), compares(lambda: kept.pop().backward())]

    kept: list[torch.Tensor] = []
    assert in_each_direction() == [0, 0]
    lpq.set_step(net, 1)
    with mock.patch.object(alike, "check_alike", wraps=alike.check_alike) as whole:
        assert [in_each_direction(), in_each_direction()] == [[0, 0], [1, 0]]
        assert whole.call_count == 1  # for recipes that changed; later only the steps are compared
    plain = built(How("mxfp8", **SMALL))
    lpq.set_step(plain, rank)  # it has no stages
    plain(X)


@on_ranks(2)
def test_a_step_on_one_rank_alone(rank: int) -> None:
    """The other one is told, since both compare in every forward as long as a recipe may change."""
    first = {"match": "0.*", "recipe": "mxfp8"}
    for weights, then in (("high_precision", "nvfp4"), ("quantized", "x=mxfp8(), w=mxfp8(), dy=mxfp8(dtype=e5m2)")):
        rules = [first, STAGED["rules"][0], {"match": "*", "recipe": then}]
        net = built(How({"rules": rules}, weights, **SMALL))
        lpq.set_step(net, 0)
        for alone, step in ((0, 1), (1, 2)):
            net(X).sum().backward()
            if rank == alone:
                lpq.set_step(net, step)
            _refused(net, "[1.up: ", "at step 0 of", f"at step {step} of")
            lpq.set_step(net, 0)


@on_ranks(2)
def test_weights_that_lpq_does_not_gather(rank: int) -> None:
    """Ranks compare in the first forward."""

    def stepped(net: nn.Module) -> None:
        net(X).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()

    net = built(How(("mxfp8", OTHER_DY)[rank], None, **SMALL))
    _refused(net, "rank 0 has [0.up: Linear", OTHER_DY)
    staged = built(How(STAGED, None, **SMALL))
    lpq.set_step(staged, 0)
    stepped(staged)
    if rank == 1:
        lpq.set_step(staged, 1)
    assert all("at step 0 of" in said for said in agreed(lambda: stepped(staged), RuntimeError))
    lpq.set_step(staged, 2)
    assert [compares(lambda: stepped(staged)) > 0 for _ in range(2)] == [True, False]  # no later step changes a recipe
    staged[0].up.recipe = ("mxfp8", "fp8-current")[rank]
    assert all("rank 1 has [0.up: " in said for said in agreed(lambda: stepped(staged), RuntimeError))


@contextmanager
def _impatient() -> Iterator[None]:
    """Have ranks soon take it that the others do not come to the same place."""
    with mock.patch.object(meeting, "SOON", 0.5), mock.patch.object(meeting, "PATIENCE", 1.0):
        yield


HIGH, QUANTIZED, PLAIN = "gathered quantized, recipe", "stored as mxfp8, recipe", "in high precision, recipe"


@pytest.mark.parametrize(
    ("weights", "other", "trains"),
    [("high_precision", None, True), (None, "high_precision", True), ("quantized", None, True),
     ("high_precision", None, False)],
)  # fmt: skip
@on_ranks(2)
def test_other_weights(rank: int, weights: Any, other: Any, trains: bool) -> None:
    """A rank that compares before it gathers meets one that gathers before it compares: both raise at once, and not at
    half of the timeout, which is a minute here."""
    words = [{"high_precision": HIGH, "quantized": QUANTIZED, None: PLAIN}[one] for one in (weights, other)]
    own = (weights, other)[rank]
    others = (
        How(("mxfp8", OTHER_DY)[rank], own, **SMALL),
        How("mxfp8", own, width=64, inner=66),  # shards with padding
        How("mxfp8", own, **SMALL, offload=True),
    )
    every = weights == "high_precision" and trains
    for how in (How("mxfp8", own, **SMALL, mixed=True), *(others if every else ())):
        net = built(how)
        with _impatient(), torch.set_grad_enabled(trains):
            _refused(net, "rank 0 has [0.up: ", *words)


@on_ranks(4)
def test_other_weights_on_one_replica(rank: int) -> None:
    weights = None if rank == 3 else "high_precision"
    with _impatient():
        net = built(How("mxfp8", weights, mesh=mesh_of("replicate", "shard"), **SMALL))
        _refused(net, f"{HIGH} mxfp8()], and rank 3 has [0.up: ", PLAIN)


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
@on_ranks(2)
def test_a_late_rank_changes_nothing(rank: int, weights: Any) -> None:
    """The others gather once in high precision, and drop what arrives."""
    net, twin = (built(How("mxfp8", weights, **SMALL)) for _ in range(2))
    expected = twin(X)
    with mock.patch.object(meeting, "SOON", 0.1), collectives() as seen:
        if rank == 1:
            time.sleep(0.4)
        y = net(X)
    with collectives() as usual:
        twin(X)
    assert torch.equal(y, expected)
    kinds = [[one.kind for one in each].count("all_gather") for each in (seen, usual)]
    assert kinds[0] == kinds[1] + 1, kinds
    y.sum().backward()


@on_ranks(2)
def test_a_model_that_one_rank_did_not_convert(rank: int) -> None:
    """That rank compares nothing. It gathers NaN from the others, until these say what is wrong."""
    net = model(**SMALL) if rank else lpq.convert(model(**SMALL), "mxfp8", weights="high_precision")
    fully_shard(net)  # in one unit
    with _impatient():
        if rank:
            assert net(X).isnan().all()
        else:
            with pytest.raises(RuntimeError, match=r"has waited 2 s to compare .* or a model that was not converted"):
                net(X)


@on_ranks(2)
def test_late(rank: int) -> None:
    """A rank that waits for another one says so, once, and goes on when that one has come."""
    net = built(How("mxfp8", **SMALL))
    with mock.patch.object(meeting, "PATIENCE", 0.2), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if rank == 1:
            time.sleep(0.8)
        net(X)
    found = [str(w.message) for w in seen if "compare their models" in str(w.message)]
    assert len(found) == (rank == 0), found
    assert all("another rank has not for 0 s" in text and "weights=None" in text for text in found)


@on_ranks(4)
def test_four_ranks(rank: int) -> None:
    """Models on meshes of their own are no concern of each other; replicas do not gather with each other, and are
    compared as well."""
    recipe = ("mxfp8", "nvfp4")[rank // 2]
    built(How(recipe, mesh=mesh_of("pair", "shard")["shard"], **SMALL))(X)
    _refused(built(How(recipe, mesh=mesh_of("replicate", "shard"), **SMALL)), "and rank 2 has [0.up: ")
