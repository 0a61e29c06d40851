"""Statistics that are summed over ranks, and a second round of them."""

from __future__ import annotations

from collections.abc import Callable

import counted_format
import pytest
import torch
import torch.distributed as dist
from quantizers import as_bytes
from ranks import spawn
from torch import Tensor

import lpq
from lpq.distributed.shardability import why_not
from lpq.operations import reduce_statistics
from lpq.operations.reduce_statistics import as_counts, from_counts
from lpq.registry import PluginError

ROWS, COLS, RANKS = 64, 48, 2


def _whole() -> Tensor:
    """Few elements exceed half of the amax, all of them on the last rank, of which they are not few."""
    x = torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * 0.4
    x[-1] += 0.6
    x[-1, 0] = 1.0
    return x


def _own(x: Tensor) -> Tensor:
    return x.chunk(RANKS)[dist.get_rank()]


def _same(a: lpq.QuantizedTensor, b: lpq.QuantizedTensor) -> bool:
    pairs = zip(a.operands, b.operands, strict=True)
    tensors = [pair for (_, m), (_, n) in pairs for pair in zip(m.tensors(), n.tensors(), strict=True)]
    return all(torch.equal(as_bytes(s), as_bytes(t)) for s, t in tensors)


def _quantized() -> lpq.QuantizedTensor:
    return lpq.quantizer("counted").quantize(_own(_whole()), amax_group=dist.group.WORLD)


def _written() -> lpq.QuantizedTensor:
    """By an optimizer, to a shard."""
    shard = lpq.quantizer("counted").quantize(torch.ones(ROWS // RANKS, COLS), amax_group=dist.group.WORLD)
    shard.copy_(_own(_whole()))
    return shard


def _shards(rank: int, make: Callable[[], lpq.QuantizedTensor], reduced: bool) -> None:
    counted_format.register()
    whole = lpq.quantizer("counted").quantize(_whole())
    assert whole.row.above == COLS
    assert whole.row.scale == 0.5 / 127 * torch.ones(())
    reduce = reduce_statistics.reduce_sum
    if not reduced:
        reduce_statistics.reduce_sum = lambda values, group: list(values)
    try:
        shard = make()
    finally:
        reduce_statistics.reduce_sum = reduce
    size = ROWS // RANKS
    assert _same(shard, whole[rank * size : rank * size + size]) is reduced


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("make", [_quantized, _written])
def test_a_shard_is_a_part_of_the_whole(make: Callable[[], lpq.QuantizedTensor], reduced: bool) -> None:
    spawn(_shards, RANKS, make, reduced)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_of_whole_numbers_is_exact_or_nan(ranks: int) -> None:
    counts = torch.tensor([3.0, 2.0**23, 0.5, -1.0, float("nan"), float("inf"), 2.0**24])
    sums = from_counts(torch.stack([as_counts(counts)] * ranks).sum(0))
    assert sums[0] == 3 * ranks
    assert sums[1:].isnan().all()


def test_a_weight_of_two_rounds_is_gathered_in_high_precision() -> None:
    counted_format.register()
    reason = why_not(lpq.quantizer("counted"), 64, 2)
    assert reason == "counted measures in two rounds, and weights are gathered after one"
    assert why_not(lpq.quantizer("counted"), 64, 1) is None


@pytest.mark.parametrize(
    ("name", "error"),
    [("once", "measures 'above' in round 2, and Once has no measure_again"), ("kept", "combined by MAX in one round")],
)
def test_what_does_not_fit_together_is_refused(name: str, error: str) -> None:
    counted_format.register()
    with pytest.raises(PluginError, match=error):
        lpq.quantizer(f"counted_{name}").ready()
