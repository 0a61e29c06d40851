"""Experts under FSDP2: each rank holds whole ones, and what it computes is what one process computes, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fully_shard, of_all, on_one, on_ranks
from sharded import decoded
from support.comparing import equal
from support.small_models import Experts
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


def _trained(model: nn.Module, masters: bool, steps: int, way: str | None) -> list[Tensor]:
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
    values = decoded(parameter)
    return torch.cat(of_all(values)) if isinstance(parameter, DTensor) else values


def _as_one(rank: int, recipe: str, weights: Any, steps: int = 2, way: str | None = None) -> None:
    masters = weights == "quantized"
    alone = on_one(_trained_alone, recipe, weights, steps, way)
    model = _model(recipe, weights, 2)
    kind = {"quantized": lpq.QuantizedTensor, "high_precision": WeightShard, None: torch.Tensor}[weights]
    fully_shard(model.up)
    fully_shard(model)
    part = local_part(model.up.weight)
    assert isinstance(part, kind)
    assert part.shape == (EXPERTS // 2, 2 * WIDTH, WIDTH)
    if way == "compiled" and rank == 0:  # the other rank does the same collectives
        model.compile(backend="aot_eager")
    assert equal(alone, _trained(model, masters, steps, way)), (recipe, weights)


def _trained_alone(recipe: str, weights: Any, steps: int, way: str | None) -> list[Tensor]:
    return _trained(_model(recipe, weights, 2), weights == "quantized", steps, way)


W16 = "x=nvfp4(), w=nvfp4(block=16x16), dy=mxfp8()"
KINDS = [
    ("nvfp4", None), ("fp8-current", "high_precision"), ("mxfp8", "quantized"), (W16, "high_precision"),
    (W16, "quantized"), ("nvfp4-eden", "high_precision"), ("nvfp4-eden", "quantized"),
    ("x=mxfp8(), w=fp8(static=true), dy=mxfp8()", "high_precision"),
]  # fmt: skip
"""Recipes, and how weights are stored."""


@pytest.mark.parametrize(("recipe", "weights"), KINDS)
@on_ranks(2)
def test_two_ranks_compute_what_one_does(rank: int, recipe: str, weights: str | None) -> None:
    _as_one(rank, recipe, weights)


@on_ranks(2)
def test_named_recipes(rank: int) -> None:
    """All others that experts take, each in one way and for one step: ranks have whole matrices, of any format, and the
    recipes of ``KINDS`` gather weights again after a step."""
    for i, recipe in enumerate(sorted({*lpq.registry.recipes()} - {*(kind for kind, _ in KINDS), "bf16"})):
        if "delayed" not in recipe:
            _as_one(rank, recipe, ("high_precision", None)[i % 2], steps=1)


@pytest.mark.parametrize(
    ("way", "weights"),
    [("accumulated", "high_precision"), ("checkpointed", "quantized"), ("checkpointed", "high_precision"),
     ("compiled", "quantized")],
)  # fmt: skip
@on_ranks(2)
def test_other_ways_of_training(rank: int, way: str, weights: str | None) -> None:
    _as_one(rank, "fp8-block", weights, way=way)


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


@on_ranks(2)
def test_a_checkpoint_of_two_ranks_loads_on_two_and_on_one(rank: int, tmp_path: Path) -> None:
    def made(shards: bool) -> nn.Module:
        model = _model("fp8-current", "quantized", 2)
        return fully_shard(model) if shards else model  # type: ignore[no-any-return]

    lpq.checkpoint.save(made(True), tmp_path / "two")
    for shards in (True, False):
        model = made(shards)
        expected = [_whole(p) for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                local_part(p).zero_()
        lpq.checkpoint.load(model, tmp_path / "two")
        assert equal(map(_whole, model.parameters()), expected)
