"""Training under FSDP2 with quantized gathers equals training with high-precision gathers, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import spawn
from sharded import How, train, whole
from torch.distributed.device_mesh import init_device_mesh

RECIPES = [
    "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4", "bf16",
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
    "fprop=fp8-row, dgrad=fp8-delayed, wgrad=nvfp4",
    "fprop=bf16, dgrad=mxfp8, wgrad=fp8-current",
    "x=mxfp8(), w=hybrid(row=mxfp8, col=nvfp4, col_source=row), dy=mxfp8()",
]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not resharded, mixed": {"reshard": False, "mixed": True},
    "accumulating": {"accumulate": 2},
    "checkpointed": {"checkpoint": True},
    "offloaded": {"offload": True},
    "nested, fused": {"nested": True, "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True)},
}


def _trains_as_with_ordinary_gathers(how: How) -> None:
    ordinary, a = train(replace(how, weights=None))
    quantized, b = train(how)
    assert ordinary == quantized, how
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q)), (how, name)


def _all_recipes_and_ways(rank: int, ways: list[str]) -> None:
    for way in ways:
        for recipe in RECIPES:
            _trains_as_with_ordinary_gathers(How(recipe, **WAYS[way]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_recipe(ranks: int) -> None:
    spawn(_all_recipes_and_ways, ranks, list(WAYS) if ranks == 2 else ["plain"])


def test_one_rank() -> None:
    spawn(_all_recipes_and_ways, 1, ["plain", "not resharded, mixed", "checkpointed"])


def _hsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for recipe in ("nvfp4", "fp8-delayed", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"):
        _trains_as_with_ordinary_gathers(How(recipe, mesh=mesh))


def test_hsdp() -> None:
    spawn(_hsdp, 4)


def _compiled(rank: int) -> None:
    for way in ({}, {"checkpoint": True}, {"reshard": False}):
        for recipe in ("fp8-current", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"):
            how = How(recipe, compile=True, **way)
            _trains_as_with_ordinary_gathers(how)


def test_compiled() -> None:
    spawn(_compiled, 2)


STORED = [
    ({"offload": True}, {}),
    ({"nested": True}, {}),
    ({"mixed": True}, {"mixed": True, "reshard": False}),
    ({"mixed": True, "checkpoint": True}, {"mixed": True}),
    ({"compile": True}, {"compile": True, "reshard": False}),
    ({"compile": True, "checkpoint": True}, {"compile": True, "checkpoint": True, "reshard": False}),
]
"""Ways of running a model whose weights are stored quantized that train alike."""


def _stored(rank: int) -> None:
    for recipe in ("fp8-current", "nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"):
        for one, other in STORED:
            if "compile" in one and recipe != "nvfp4":
                continue  # a compilation takes seconds
            losses = [train(How(recipe, weights="quantized", ranks=2, **way))[0] for way in (one, other)]
            assert losses[0] == losses[1], (recipe, one)
            assert losses[0][0] != losses[0][1]


def test_stored_weights() -> None:
    spawn(_stored, 2)
