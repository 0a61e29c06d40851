"""Sharding in miniature: with statistics combined by MAX, each shard encodes to its piece of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lpq.core import Quantizer, Stat
from lpq.core.quantizer import Direction
from lpq.testing.expect import same, same_operand
from lpq.testing.operands import DIRECTIONS, encode, measure, normal, unit
from lpq.testing.options import only

RANKS = 3


def sharded(side: Quantizer, dim: int) -> tuple[Tensor, list[Tensor], int]:
    """A matrix, its shards along a dimension of the operand, and the size of each.

    One shard has an outlier, so that whatever is computed from a shard alone shows.
    """
    if (reason := side.why_no_parts(dim)) is not None:
        pytest.skip(f"it is not sharded so: {reason}")
    size = math.lcm(16, unit(side, dim))
    x = normal(RANKS * size, 40) if dim == 0 else normal(40, RANKS * size)
    x.narrow(dim, size, size).mul_(37)
    return x, [x.narrow(dim, rank * size, size) for rank in range(RANKS)], size


def reduced(stat: Stat, dim: int, parts: list[Tensor]) -> Tensor:
    """What the ranks know together: MAX where an element covers several shards, else side by side."""
    return torch.stack(parts).amax(0) if stat.block[dim] is None else torch.cat(parts, dim)


@pytest.mark.parametrize("direction", DIRECTIONS)
@only(lambda side: bool(side.stats), "measures statistics")
def test_statistics_of_shards_are_those_of_the_whole(side: Quantizer, direction: Direction) -> None:
    """Measured locally and reduced equals measured on the whole, for row and for column operands."""
    dim = DIRECTIONS.index(direction)
    x, shards, _ = sharded(side, dim)
    whole, parts = measure(side, x), [measure(side, shard) for shard in shards]
    for stat in side.stats:
        what = f"{side}: statistic {stat.name!r} of a {direction} operand, reduced over {RANKS} shards"
        same(reduced(stat, dim, [part[stat.name] for part in parts]), whole[stat.name], what)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_shard_is_its_piece_of_the_whole(side: Quantizer, direction: Direction) -> None:
    """With reduced statistics, and its offset for random bits, a shard has the bytes of its place.

    A format that takes a scale from the shard itself, not from ``stats``, fails here: ranks would disagree.
    """
    dim = DIRECTIONS.index(direction)
    x, shards, size = sharded(side, dim)
    whole, parts = encode(side, x, direction=direction), [measure(side, shard) for shard in shards]
    spanning = [stat for stat in side.stats if stat.block[dim] is None]
    alone = []
    for rank, shard in enumerate(shards):
        stats = dict(parts[rank])
        for stat in spanning:
            stats[stat.name] = reduced(stat, dim, [part[stat.name] for part in parts])
        offset = (rank * size, 0) if dim == 0 else (0, rank * size)
        piece = whole.narrow(dim, rank * size, (rank + 1) * size)
        assert piece is not None
        what = f"{side}: shard {rank} of {RANKS} of a {direction} operand, encoded with the reduced statistics"
        same_operand(encode(side, shard, stats, direction=direction, offset=offset), piece, what)
        alone.append(encode(side, shard, parts[rank], direction=direction, offset=offset).decode())
    if spanning:
        own = torch.cat(alone, dim)
        assert not torch.equal(own, whole.decode()), f"{side} encodes alike without the reduction: this saw nothing"
