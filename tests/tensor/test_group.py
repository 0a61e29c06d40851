"""Statistics of a tensor that several ranks share: reduced over the group of the call, before anything is derived."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import lpq

RANKS = 2


def _whole() -> torch.Tensor:
    x = torch.randn(256, 96, generator=torch.Generator().manual_seed(0))
    x[200, 7] = 1000.0  # an outlier on the last rank
    return x


@on_ranks(RANKS)
def test_nan_reaches_every_rank(rank: int) -> None:
    x = torch.randn(128, 64)
    if rank == 1:
        x[3, 3] = float("nan")
    t = lpq.quantizer("nvfp4").quantize(x, amax_group=dist.group.WORLD)
    assert t.row.amax.isnan()
    assert not t.dequantize().isfinite().any()


@on_ranks(RANKS)
def test_a_write_uses_the_group(rank: int) -> None:
    x = _whole()
    shard = lpq.quantizer("fp8").quantize(x[rank * 128 : rank * 128 + 128], amax_group=dist.group.WORLD)
    shard.copy_(2 * x[rank * 128 : rank * 128 + 128])
    assert shard.row.scale == lpq.quantizer("fp8").quantize(x * 2).row.scale


@on_ranks(RANKS)
def test_cut_blocks_are_refused_on_every_rank(rank: int) -> None:
    with pytest.raises(ValueError, match=r"a shard has no operand .*: shards of 24 rows cut the blocks of 32 of mxfp8"):
        lpq.quantizer("mxfp8").quantize(torch.randn(24, 64), amax_group=dist.group.WORLD)


@on_ranks(RANKS)
def test_delayed_state_is_reduced(rank: int) -> None:
    quantizer = lpq.quantizer("fp8(scaling=delayed, history=4)")
    state = quantizer.new_state()
    x = _whole()[rank * 128 : rank * 128 + 128]
    quantizer.quantize(x, state=state, amax_group=dist.group.WORLD)
    assert state["amax_history"][0] == 1000.0


@on_ranks(RANKS)
def test_a_group_of_one(rank: int) -> None:
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]
    x = torch.randn(24, 64)
    grouped = lpq.quantizer("mxfp8").quantize(x, amax_group=alone)
    assert torch.equal(grouped.dequantize(), lpq.quantizer("mxfp8").quantize(x).dequantize())
