"""Experts under FSDP2: each rank holds whole ones, and what it computes is what one process computes, to the bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fully_shard, on_ranks, spawn
from support.small_models import Experts
from test_every_recipe import THIRD_PARTIES, recipe_of, register
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.distributed.shard import WeightShard
from lpq.optim import MasterWeights
from lpq.torch_private.tensors import local_part

EXPERTS, WIDTH, COUNTS = 4, 64, [7, 0, 20, 5]


def _model(recipe: str, weights: Any, ranks: int) -> Experts:
    model = Experts(EXPERTS, WIDTH, 2 * WIDTH, bias=False)
    with torch.no_grad():
        model.up.weight[1] *= 100
    lpq.convert(model, recipe, weights=weights, ranks=ranks if weights is not None else None)
    for name, memory in model.named_buffers():
        if name.endswith("w_amax"):  # static, and another one for each expert
            memory.copy_(torch.tensor([1.0, 300.0, 2.0, 0.5]))
    return model


def _trained(model: nn.Module, masters: bool, steps: int = 2, way: str | None = None) -> list[Tensor]:
    """Outputs and, after the last step, whole weights; ``way``: of training, ``"accumulated"`` in two micro-batches."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = MasterWeights(optimizer, keep=masters)
    torch.manual_seed(1)  # of random bits
    offs, found = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32), []
    for step in range(steps):
        x = torch.randn(sum(COUNTS) + 2, WIDTH, generator=torch.Generator().manual_seed(step))
        for scale in (1.0, -3.0) if way == "accumulated" else (1.0,):
            y = (
                checkpoint(model, x * scale, offs, use_reentrant=False)
                if way == "checkpointed"
                else model(x * scale, offs)
            )
            (y.square().sum() / y.numel()).backward()
            found.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    return found + [_whole(p) for p in model.parameters()]


def _whole(parameter: Tensor) -> Tensor:
    local = local_part(parameter.detach())
    values = local.dequantize() if isinstance(local, lpq.QuantizedTensor) else torch.Tensor(local.clone())
    if not isinstance(parameter, DTensor):
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def _as_one(rank: int, recipe: str, weights: Any, way: str | None = None) -> None:
    masters = weights == "quantized"
    alone = _trained(_model(recipe, weights, 2), masters, way=way)
    model = _model(recipe, weights, 2)
    kind = {"quantized": lpq.QuantizedTensor, "high_precision": WeightShard, None: torch.Tensor}[weights]
    fully_shard(model.up)
    fully_shard(model)
    part = local_part(model.up.weight)
    assert isinstance(part, kind)
    assert part.shape == (EXPERTS // 2, 2 * WIDTH, WIDTH)
    if way == "compiled" and rank == 0:  # the other rank does the same collectives
        model.compile(backend="aot_eager")
    sharded = _trained(model, masters, way=way)
    for a, b in zip(alone, sharded, strict=True):
        assert torch.equal(a, b), (recipe, weights)


@pytest.mark.parametrize(
    ("recipe", "weights"),
    [
        ("nvfp4", None),
        ("fp8-current", "high_precision"),
        ("mxfp8", "quantized"),
        ("x=nvfp4(), w=nvfp4(block=16x16), dy=mxfp8()", "high_precision"),
        ("x=nvfp4(), w=nvfp4(block=16x16), dy=mxfp8()", "quantized"),
        ("x=mxfp8(), w=fp8(static=true), dy=mxfp8()", "high_precision"),
    ],
)
def test_two_ranks_compute_what_one_does(recipe: str, weights: str | None) -> None:
    spawn(_as_one, 2, recipe, weights)


@pytest.mark.parametrize(
    ("way", "weights"),
    [("accumulated", "high_precision"), ("accumulated", "quantized"), ("checkpointed", "high_precision"),
     ("checkpointed", "quantized"), ("compiled", "high_precision"), ("compiled", "quantized")],
)  # fmt: skip
def test_other_ways_of_training(way: str, weights: str | None) -> None:
    spawn(_as_one, 2, "fp8-block", weights, way)


def _every(rank: int, recipes: list[str], weights: list[str | None]) -> None:
    register()
    for recipe, each in zip(recipes, itertools.cycle(weights)):
        _as_one(rank, recipe, each)


def test_every_recipe_with_a_name() -> None:
    named = [name for name in sorted(lpq.registry.recipes()) if name != "fp8-delayed"]
    assert len(named) > 8
    spawn(_every, 2, named, [None, "quantized"])


def test_every_format(mxfp4: None) -> None:
    """Formats that no recipe of lpq's names."""
    spawn(_every, 2, [recipe_of(text) for text in THIRD_PARTIES], ["high_precision"])


@on_ranks(2)
def test_the_report_says_how_experts_are_gathered(rank: int) -> None:
    model = _model("fp8-current", "quantized", 2)
    fully_shard(model)
    notes = {entry.name: entry.note for entry in lpq.report(model).weights}
    assert notes["up"].startswith("stored and gathered as fp8: 0.50 of bf16"), notes


def test_experts_that_cannot_be_shared_out_stay_in_high_precision() -> None:
    model = _model("fp8-current", "quantized", 4)
    assert isinstance(model.up.weight, lpq.QuantizedTensor)
    with pytest.warns(UserWarning, match="its 4 matrices over 3 ranks are uneven"):
        model = _model("fp8-current", "quantized", 3)
    assert isinstance(model.up.weight, WeightShard)


def _saved(rank: int, folder: Path, save: bool, ranks: int) -> None:
    model = _model("fp8-current", "quantized", 2)
    if ranks > 1:
        fully_shard(model)
    if save:
        lpq.checkpoint.save(model, folder)
        return
    expected = [_whole(p) for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            local_part(p).zero_()
    lpq.checkpoint.load(model, folder)
    for p, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(_whole(p), wanted)


def test_a_checkpoint_of_two_ranks_loads_on_two_and_on_one(tmp_path: Path) -> None:
    spawn(_saved, 2, tmp_path / "two", True, 2)
    spawn(_saved, 2, tmp_path / "two", False, 2)
    _saved(0, tmp_path / "two", False, 1)
