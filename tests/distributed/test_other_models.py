"""Ranks that have other models: all raise at the first gather, or when recipes change, and say what differs where."""

from __future__ import annotations

import time
import warnings
from unittest import mock

import torch
from ranks import agreed, on_ranks
from sharded import How, built
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lpq
from lpq.distributed import alike, meeting
from lpq.observe import collectives

SMALL = {"width": 64, "inner": 256}
STAGED = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 2}, {"match": "*", "recipe": "nvfp4"}]}
LAYER = "Linear with a weight [256, 64] of torch.float32"


def _compared(net: nn.Module) -> list[bool]:
    """Whether ranks compare steps in forward, and in backward."""
    with collectives() as forward:
        y = net(torch.ones(4, 64)).sum()
    with collectives() as backward:
        y.backward()
    return [any((c.kind, c.bytes) == ("all_reduce", 32) for c in seen) for seen in (forward, backward)]


def _refused(net: nn.Module, *words: str) -> None:
    """At the first gather, before anything is gathered of other sizes."""
    for said in agreed(lambda: net(torch.ones(4, 64)), RuntimeError):
        assert said.startswith("RuntimeError: the ranks do not have the same model: rank 0 has ["), said
        assert all(word in said for word in words), (words, said)
        assert said.endswith("alike on all ranks"), said


@on_ranks(2)
def test_other_models(rank: int) -> None:
    other_dy = "x=mxfp8(), w=mxfp8(), dy=nvfp4()"
    for recipes, words in (
        (("mxfp8", "mxfp8(dtype=e5m2)"), (f"[0.up: {LAYER}", ", recipe mxfp8()]", ", recipe mxfp8(dtype=e5m2)]")),
        (("mxfp8", other_dy), (f", recipe {other_dy}]",)),
        (("fp8-current", "nvfp4"), (", dy=fp8(dtype=e5m2), w.save=weight]", "w=nvfp4(block=16x16)")),
        (("mxfp8", "fp8-delayed"), ("w=fp8(scaling=delayed)",)),
    ):
        _refused(built(How(recipes[rank], **SMALL)), *words)
    _refused(built(How("mxfp8", **SMALL, blocks=2 + rank)), "has [no more layers], and rank 1 has [2.norm: LayerNorm")
    stored = built(How("mxfp8", ("high_precision", "quantized")[rank], **SMALL))
    _refused(stored, f"[0.up: {LAYER}, gathered quantized, recipe", "stored as mxfp8, recipe")
    _refused(built(How("mxfp8", width=64, inner=256 * (1 + rank))), "weight [256, 64]", "weight [512, 64]")
    mixed = built(How("mxfp8", **SMALL, mixed=bool(rank)))
    _refused(mixed, "torch.float32, in high precision", "torch.bfloat16, in high precision")


@on_ranks(2)
def test_other_steps(rank: int) -> None:
    """As they are before the first gather, and where all change their recipes."""
    net = built(How(STAGED, **SMALL))
    if rank == 0:
        lpq.set_step(net, 0)
    _refused(net, "recipe mxfp8(), at step 0 of (mxfp8 until step 2, then nvfp4)]", "mxfp8(), before lpq.set_step]")
    lpq.set_step(net, 0)
    net(torch.ones(4, 64))
    lpq.set_step(net, 1)
    net(torch.ones(4, 64))
    lpq.set_step(net, 2 + rank)
    _refused(net, "at step 2 of", "at step 3 of")
    lpq.set_step(net, 2)
    net(torch.ones(4, 64))
    lpq.set_step(net, 3)  # which changes no recipe
    assert _compared(net) == [False, False]
    lpq.set_step(net, 1)
    with mock.patch.object(alike, "check_alike", wraps=alike.check_alike) as whole:
        assert [_compared(net), _compared(net)] == [[False, False], [True, False]]
        assert whole.call_count == 1  # for recipes that changed; later only the steps are compared
    plain = built(How("mxfp8", **SMALL))
    lpq.set_step(plain, rank)  # it has no stages
    plain(torch.ones(4, 64))


@on_ranks(2)
def test_a_step_on_one_rank_alone(rank: int) -> None:
    """The other one is told, since both compare in every forward as long as a recipe may change."""
    first = {"match": "0.*", "recipe": "mxfp8"}
    other_dy = {"match": "*", "recipe": "x=mxfp8(), w=mxfp8(), dy=mxfp8(dtype=e5m2)"}
    for weights, then in (("high_precision", STAGED["rules"][1]), ("quantized", other_dy)):
        net = built(How({"rules": [first, STAGED["rules"][0], then]}, weights, **SMALL))
        lpq.set_step(net, 0)
        for alone, step in ((0, 1), (1, 2)):
            net(torch.ones(4, 64)).sum().backward()
            if rank == alone:
                lpq.set_step(net, step)
            _refused(net, "[1.up: ", "at step 0 of", f"at step {step} of")
            lpq.set_step(net, 0)


@on_ranks(2)
def test_weights_that_lpq_does_not_gather(rank: int) -> None:
    """Ranks compare in the first forward."""

    def stepped(net: nn.Module) -> None:
        net(torch.ones(4, 64)).sum().backward()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.step()

    other_dy = "x=mxfp8(), w=mxfp8(), dy=nvfp4()"
    net = built(How(("mxfp8", other_dy)[rank], None, **SMALL))
    _refused(net, "rank 0 has [0.up: Linear", other_dy)
    staged = built(How(STAGED, None, **SMALL))
    lpq.set_step(staged, 0)
    stepped(staged)
    if rank == 1:
        lpq.set_step(staged, 1)
    for said in agreed(lambda: stepped(staged), RuntimeError):
        assert "at step 0 of" in said, said
    lpq.set_step(staged, 2)
    for compares in (True, False):  # no later step changes a recipe
        with collectives() as seen:
            stepped(staged)
        assert any((c.kind, c.bytes) == ("all_reduce", 32) for c in seen) == compares
    staged[0].up.recipe = ("mxfp8", "fp8-current")[rank]
    for said in agreed(lambda: stepped(staged), RuntimeError):
        assert "rank 1 has [0.up: " in said, said


@on_ranks(2)
def test_late(rank: int) -> None:
    """A rank that waits for another one says so, once, and goes on when that one has come."""
    net = built(How("mxfp8", **SMALL))
    patience, meeting.PATIENCE = meeting.PATIENCE, 0.2
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if rank == 1:
                time.sleep(2.5)  # a store of files looks at the clock once a second
            net(torch.ones(4, 64))
    finally:
        meeting.PATIENCE = patience
    found = [str(w.message) for w in seen if "compare their models" in str(w.message)]
    assert len(found) == (rank == 0), found
    assert all("another rank has not for 0 s" in text and "weights=None" in text for text in found)


@on_ranks(2)
def test_by_hand(rank: int) -> None:
    net = built(How("mxfp8", **SMALL))
    net(torch.ones(4, 64))
    net[1].up.recipe = ("nvfp4", "mxfp8(dtype=e5m2)")[rank]
    _refused(net, "[1.up: ")


def _two_meshes(rank: int) -> None:
    """Models on meshes of their own are no concern of each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))["shard"]
    built(How(("mxfp8", "nvfp4")[rank // 2], mesh=mesh, **SMALL))(torch.ones(4, 64))


def _replicas(rank: int) -> None:
    """They do not gather with each other, and are compared as well."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _refused(built(How(("mxfp8", "nvfp4")[rank // 2], mesh=mesh, **SMALL)), "and rank 2 has [0.up: ")


@on_ranks(4)
def test_four_ranks(rank: int) -> None:
    _two_meshes(rank)
    _replicas(rank)
