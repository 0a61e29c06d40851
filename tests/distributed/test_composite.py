"""Weights in a format that is made of others: gathered and saved as any, and kept whole where a part must be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import residual_format
import torch
import torch.distributed as dist
from operands import expected, gathered, side, value
from ranks import fully_shard, spawn
from support.comparing import equal_states
from torch.distributed.tensor import distribute_tensor

import lpq
from lpq import checkpoint
from lpq.core import QuantizedTensor

ROWS, COLS, SEED = 128, 96, 5
CUT = [
    "residual(base=nvfp4, rest=mxfp8)",
    "residual(base=fp8, rest=fp8(scaling=block, block=1x128))",
    "residual(base=hybrid(row=mxfp8, col=nvfp4), rest=identity(dtype=bf16))",
]
WHOLE = "residual(base=nvfp4, rest=fp8)"
WORDS = "of an operand of residual(base=nvfp4, rest=fp8) must not be cut"


def _net(texts: list[str], weights: str, seed: int) -> tuple[Any, list[Any]]:
    values = [value(ROWS * 2, COLS, seed + i) for i in range(len(texts))]
    net = side(texts, values, weights, ranks=2)
    fully_shard(net)
    return net, values


def _check(net: Any, texts: list[str], values: list[Any], x: Any) -> None:
    found = gathered(net, x)
    for i, (text, whole) in enumerate(zip(texts, values, strict=True)):
        for when, direction in (("forward", "row"), ("backward", "col")):
            assert equal_states(found[f"layers.{i}", when], expected(text, whole, direction)), (text, when)


def _gathered_and_saved(rank: int, path: Path) -> None:
    """The bytes are those of quantizing the whole: as converted, written to, and loaded from a checkpoint."""
    x = torch.randn(32, COLS, generator=torch.Generator().manual_seed(rank))
    for weights in ("quantized", "high_precision"):
        net, values = _net(CUT, weights, SEED)
        assert all("gathered as residual" in entry.note for entry in lpq.report(net).weights)
        _check(net, CUT, values, x)
    net, _ = _net(CUT, "quantized", SEED)
    written = [value(2 * ROWS, COLS, 1000 + i) for i in range(len(CUT))]
    with torch.no_grad():
        for layer, new in zip(net.layers, written, strict=True):
            assert isinstance(layer.weight._local_tensor, QuantizedTensor)
            mesh, placements = layer.weight.device_mesh, layer.weight.placements
            layer.weight.copy_(distribute_tensor(new, mesh, placements, src_data_rank=None))
    _check(net, CUT, written, x)
    checkpoint.save(net, path)
    other, _ = _net(CUT, "quantized", 77)
    checkpoint.load(other, path)
    _check(other, CUT, written, x)


def _kept_whole(rank: int, path: Path) -> None:
    """The amax of what is left would take a second round: no shard has it."""
    net, _ = _net([WHOLE], "high_precision", SEED)
    assert [WORDS in entry.note for entry in lpq.report(net).weights] == [True]
    x = value(ROWS, COLS)
    with pytest.raises(ValueError, match=re.escape(WORDS)):
        lpq.quantizer(WHOLE).quantize(x, amax_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="a shard of 80 rows cuts the blocks of 32 rows that residual"):
        lpq.quantizer(CUT[0]).quantize(x[:80], amax_group=dist.group.WORLD)


def _with_the_format(rank: int, check: Callable[[int, Path], None], path: Path) -> None:
    residual_format.register()
    check(rank, path)


@pytest.mark.parametrize("check", [_gathered_and_saved, _kept_whole])
def test_two_ranks(check: Callable[[int, Path], None], tmp_path: Path) -> None:
    spawn(_with_the_format, 2, check, tmp_path / "saved")
