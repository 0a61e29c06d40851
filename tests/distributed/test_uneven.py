"""Three ranks and odd sizes: weights that cannot be cut stay in high precision, on every rank alike; nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operands import watched
from ranks import fully_shard, spawn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed.shard import WeightShard
from lpq.optim import MasterWeights

RANKS = 3
WIDTHS = [96, 90, 100, 250, 384, 514, 96, 2, 1, 40]
"""Rows over three ranks: 96 in whole blocks of 16 and 32, 90 in cut ones, 384 in those of 128, the others uneven, and
two and one are fewer than ranks."""
NAMES = {str(i): rows for i, rows in enumerate(WIDTHS[1:])}
RECIPES = {
    "x=mxfp8(), w=fp8(), dy=mxfp8()": {90, 384, 96},
    "x=mxfp8(), w=fp8(scaling=row), dy=mxfp8()": {90, 384, 96},
    "mxfp8": {384, 96},
    "nvfp4": {384, 96},
    "x=mxfp8(), w=fp8(scaling=block, block=128x128), dy=mxfp8()": {384},
    "x=mxfp8(), w=hybrid(row=nvfp4, col=fp8(scaling=block)), dy=mxfp8()": {384},
    "x=mxfp8(), w=hybrid(row=fp8, col=mxfp8, col_source=row), dy=mxfp8()": {90, 384, 96},
    "fp8-delayed": {90, 384, 96},
}
"""How many rows can be cut for three ranks."""
BOTH = ("mxfp8", "x=mxfp8(), w=fp8(), dy=mxfp8()")
"""Stored with master weights and without; each of the others in one of these ways."""
STOCHASTIC = "x=mxfp8(), w=nvfp4(stochastic=true), dy=mxfp8()"


def _model(recipe: str, weights: Any, ranks: int | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    return lpq.convert(nn.Sequential(*layers), recipe, weights=weights, ranks=ranks, include="all")


def _shard(net: nn.Sequential) -> nn.Sequential:
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    return net


def _run(net: nn.Sequential, optimizer: torch.optim.Optimizer, share: float = 1.0) -> list[float]:
    """The losses of three steps. ``share``: of this rank in the gradient."""
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        x = torch.randn(64, WIDTHS[0], generator=torch.Generator().manual_seed(step))
        loss = (net(x) * 10).square().mean()
        (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(torch.tensor(losses).isfinite())
    assert losses[0] != losses[-1]
    return losses


def _whole(parameter: Tensor) -> Tensor:
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return value.dequantize() if isinstance(value, QuantizedTensor) else value.detach()


def _on_every_rank(said: str) -> str:
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, said)
    assert len(set(every)) == 1
    return said


def _notes(net: nn.Sequential) -> dict[str, str]:
    report = lpq.report(net)
    _on_every_rank(str(report))
    return {entry.name: entry.note for entry in report.weights}


def _says(notes: dict[str, str], fit: set[int], kept: str) -> None:
    """Every weight is in the report, by name, with what becomes of it and why."""
    assert notes.keys() == NAMES.keys()
    for name, rows in NAMES.items():
        if rows in fit:
            assert notes[name].startswith(kept), (rows, notes[name])
        elif rows % RANKS:
            assert notes[name] == f"in high precision: its {rows} rows over 3 ranks are uneven"
        else:
            start = f"in high precision: shards of {rows // RANKS} of its {rows} rows cut the blocks of "
            assert notes[name].startswith(start), notes[name]


# ---------------------------------------------------------------------------------- gathered quantized


def _what_is_gathered(net: nn.Sequential) -> dict[str, set[str]]:
    seen: dict[str, set[str]] = {}

    def sees(name: str, when: str, weight: Tensor) -> None:
        seen.setdefault(type(weight).__name__, set()).add(name)

    with watched(net, sees):
        net(torch.randn(64, WIDTHS[0]).requires_grad_()).square().mean().backward()
    for parameter in net.parameters():
        parameter.grad = None
    return seen


def _high_precision(rank: int) -> None:
    for recipe, fit in RECIPES.items():
        told_before = _model(recipe, "high_precision", RANKS)
        net = _model(recipe, "high_precision")
        assert all(isinstance(layer.weight.data, WeightShard) for layer in net)
        _says(_notes(told_before), fit, "gathered as ")
        _says(_notes(_shard(net)), fit, "gathered as ")
        ordinary = _shard(_model(recipe, None))
        expected = _run(ordinary, torch.optim.AdamW(ordinary.parameters(), lr=1e-2))
        assert _run(net, torch.optim.AdamW(net.parameters(), lr=1e-2)) == expected, recipe
        for (name, p), q in zip(ordinary.named_parameters(), net.parameters(), strict=True):
            assert torch.equal(_whole(p), _whole(q)), (recipe, name)
        _says(_notes(net), fit, "gathered as ")
        seen = _what_is_gathered(net)
        assert seen["QuantizedTensor"] == {name for name, rows in NAMES.items() if rows in fit}, recipe


def _stochastic(rank: int) -> None:
    net = _shard(_model(STOCHASTIC, "high_precision"))
    for note in _notes(net).values():
        assert note.startswith("in high precision: nvfp4(stochastic=true) rounds stochastically")
    _run(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    seen = _what_is_gathered(net)
    assert "QuantizedTensor" not in seen, seen


# ---------------------------------------------------------------------------------- stored quantized


def _quantized(rank: int) -> None:
    """As without sharding: rank 0 alone has a share in the gradients, since a third of three times x need not be x.

    It compares, too: what it gathers, all have, and all have its losses.
    """
    for recipe, fit in RECIPES.items():
        if recipe == "fp8-delayed":
            continue  # its layers would remember the gradients of other ranks
        for masters in (False, True) if recipe in BOTH else (len(fit) == 2,):
            net, twin = (_model(recipe, "quantized", RANKS) for _ in range(2))
            _says(_notes(net), fit, "stored and gathered as ")
            _shard(net)
            _says(_notes(net), fit, "stored and gathered as ")
            for name, rows in NAMES.items():
                local = net[int(name)].weight._local_tensor
                assert isinstance(local, QuantizedTensor if rows in fit else WeightShard)
            for module in net.modules():
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            optimizers = [torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (net, twin)]
            ours, theirs = [MasterWeights(o, keep=masters) for o in optimizers]
            losses = _run(net, ours, float(rank == 0))
            _on_every_rank(str(losses))
            values = {name: _whole(p) for name, p in net.named_parameters()}
            if rank == 0:
                assert losses == _run(twin, theirs), (recipe, masters)
                for (name, value), q in zip(values.items(), twin.parameters(), strict=True):
                    assert torch.equal(value, _whole(q)), (recipe, masters, name)


def _refused_where_it_is_sharded(rank: int) -> None:
    """Without ``ranks`` every weight is stored quantized, and FSDP2 cannot cut some."""
    for rows, recipe, words in (
        (90, "mxfp8", "a [90, 64] tensor that is stored as mxfp8 has no shard of 30 rows: it cuts blocks of 32"),
        (96, "fp8-block", "cuts blocks of 128"),
        (100, "nvfp4", "a [100, 64] tensor that is stored as nvfp4(block=16x16) has no shard of 34 rows: "),
        (100, "fp8-current", "tensor that is stored as fp8 has no shard of 34 rows: it leaves a smaller one"),
        (4, "fp8-current", "shards of 2 rows of a tensor that is stored as fp8 leave nothing to some ranks"),
        (2, "fp8-current", "shards of 1 rows of a tensor that is stored as fp8 leave nothing to some ranks"),
        (1, "mxfp8", "shards of 1 rows of a tensor that is stored as mxfp8 leave nothing to some ranks"),
    ):
        net = lpq.convert(nn.Sequential(nn.Linear(64, rows)), recipe, weights="quantized", include="all")
        with pytest.raises(ValueError, match="that is stored as") as caught:
            fully_shard(net)
        said = _on_every_rank(str(caught.value))
        assert said.startswith("0.weight: ")
        assert words in said, said
        assert "give lpq.convert(…, ranks=…) the number of ranks" in said


@pytest.mark.parametrize("check", [_high_precision, _stochastic, _quantized, _refused_where_it_is_sharded])
def test_three_ranks(check: Callable[[int], None]) -> None:
    spawn(check, RANKS)
