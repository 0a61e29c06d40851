"""One rank holds an outlier: all ranks have the scales that it makes, in what is gathered and in stored shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operands import Side, side, value, watched
from ranks import fully_shard, spawn
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

import lpq
from lpq.core import QuantizedTensor

ROWS, COLS = 256, 96
SPANNING = [
    "fp8", "fp8(dtype=e5m2, pow2=true)", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "nvfp4",
    "nvfp4(block=16x16)", "hybrid(row=nvfp4, col=fp8)", "hybrid(row=fp8, col=nvfp4)", "hybrid(row=mxfp8, col=nvfp4)",
    "hybrid(row=fp8, col=mxfp8, col_source=row)",
]  # fmt: skip
"""Formats with a value that covers rows of several ranks."""


def _sharded(weights: str) -> Side:
    net = side(SPANNING, [value(ROWS, COLS, i) for i in range(len(SPANNING))], weights)
    fully_shard(net)
    return net


def _from_every_rank(of: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, of)
    return found


def _spanning(weight: QuantizedTensor) -> dict[str, Tensor]:
    """The buffers of a weight that have values for rows of several ranks."""
    return {
        f"{d}.{b.name}": getattr(storage, b.name).clone()
        for d, storage in weight.operands
        for b in storage.layout_for(storage.quantizer)
        if b.unit(0 if d == "row" else 1) is None
    }


def _gathered_scales_are_equal(net: Side) -> list[dict[str, Tensor]]:
    """In forward those of the row operand, in backward those of the column operand."""
    scales: dict[str, dict[str, Tensor]] = {}

    def sees(name: str, when: str, weight: Tensor) -> None:
        assert isinstance(weight, QuantizedTensor)
        side = "row" if when == "forward" else "col"
        scales.setdefault(name, {}).update(
            {key: scale for key, scale in _spanning(weight).items() if key.startswith(side)}
        )

    with watched(net, sees):
        net(torch.randn(32, COLS).requires_grad_()).sum().backward()
    assert len(scales) == len(SPANNING)
    for here, *others in zip(*_from_every_rank(list(scales.values())), strict=True):
        assert here
        for other in others:
            assert all(torch.equal(here[name], other[name]) for name in here)
    return list(scales.values())


def _with_the_group(rank: int, ranks: int) -> None:
    """And without it they differ: of the shard as this rank has it, quantized by itself."""
    net = _sharded("high_precision")
    scales = _gathered_scales_are_equal(net)
    shards = [layer.weight.to_local() for layer in net.layers]
    shards = [shard.held if hasattr(shard, "held") else shard for shard in shards]
    alone = [_spanning(lpq.quantizer(text).quantize(s.detach())) for text, s in zip(SPANNING, shards, strict=True)]
    every = _from_every_rank(alone)
    for i, (text, together) in enumerate(zip(SPANNING, scales, strict=True)):
        assert all(not torch.equal(every[0][i][name], every[-1][i][name]) for name in together), text


def _stored(rank: int, ranks: int) -> None:
    """Shards that are stored quantized: as converted, and as written to, in place."""
    net = _sharded("quantized")
    _gathered_scales_are_equal(net)
    old = [_spanning(layer.weight._local_tensor) for layer in net.layers]
    new = [value(ROWS, COLS, 50 + i) * 3 for i in range(len(SPANNING))]
    copies = [layer.weight._local_tensor.detach().clone() for layer in net.layers]
    with torch.no_grad():
        for layer, values in zip(net.layers, new, strict=True):
            weight = layer.weight
            weight.copy_(distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None))
    held = [_spanning(layer.weight._local_tensor) for layer in net.layers]
    rows = ROWS // ranks
    for copy, values in zip(copies, new, strict=True):
        copy.amax_group = None
        copy.copy_(values[rank * rows : (rank + 1) * rows])
    alone = [_spanning(copy) for copy in copies]
    for i, text in enumerate(SPANNING):
        assert all(not torch.equal(old[i][name], held[i][name]) for name in held[i]), text
    first, *others = _from_every_rank(held)
    for other in others:
        assert all(torch.equal(a[name], b[name]) for a, b in zip(first, other, strict=True) for name in a)
    every = _from_every_rank(alone)
    for i, text in enumerate(SPANNING):
        assert all(not torch.equal(every[0][i][name], every[-1][i][name]) for name in every[0][i]), text


@pytest.mark.parametrize(("check", "ranks"), [(_with_the_group, 4), (_stored, 2)])
def test_one_rank_has_an_outlier(check: Callable[[int, int], None], ranks: int) -> None:
    spawn(check, ranks, ranks)
