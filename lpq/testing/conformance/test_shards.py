"""Sharding in miniature: statistics measured on row shards and combined by MAX give each shard its piece of the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.core import Quantizer, Stat
from lpq.core.quantizer import Direction
from lpq.testing.expect import same, same_operand
from lpq.testing.operands import DIRECTIONS, encode, measure, normal, unit
from lpq.testing.options import only


def sharded(quantizer: Quantizer, direction: Direction) -> tuple[Quantizer, Tensor, list[Tensor], int, int]:
    """A matrix as this operand sees it, its three shards, the dimension they share out and the size of each.

    One shard has an outlier, so that whatever is computed from a shard alone shows.
    """
    side = quantizer.side(direction)
    dim = DIRECTIONS.index(direction)
    size = unit(side, dim) * (1 if unit(side, dim) >= 16 else 16)
    shape = [40, 40]
    shape[dim] = 3 * size
    x = normal(shape[0], shape[1])
    x.narrow(dim, size, size).mul_(37)
    return side, x, [x.narrow(dim, rank * size, size) for rank in range(3)], dim, size


def reduced(stat: Stat, dim: int, parts: list[Tensor]) -> Tensor:
    """What the ranks know together: MAX where an element covers several shards, side by side where it does not."""
    return torch.stack(parts).amax(0) if stat.block[dim] is None else torch.cat(parts, dim)


@only(lambda q: bool(q.side("row").stats or q.side("col").stats), "measures statistics")
def test_statistics_of_shards_are_those_of_the_whole(quantizer: Quantizer) -> None:
    """Measured locally and reduced equals measured on the whole, for each statistic of each operand."""
    for direction in DIRECTIONS:
        side, x, shards, dim, _ = sharded(quantizer, direction)
        whole, parts = measure(side, x), [measure(side, shard) for shard in shards]
        for stat in side.stats:
            same(
                reduced(stat, dim, [part[stat.name] for part in parts]), whole[stat.name],
                f"{side}: statistic {stat.name!r} of the {direction} operand, reduced over three shards",
            )  # fmt: skip


def test_a_shard_is_its_piece_of_the_whole(quantizer: Quantizer) -> None:
    """With reduced statistics, and its offset for random bits, a shard encodes to the bytes it has in the whole.

    A format that takes a scale from the shard itself, not from ``stats``, fails here: its ranks would disagree.
    """
    for direction in DIRECTIONS:
        side, x, shards, dim, size = sharded(quantizer, direction)
        whole = encode(side, x, direction=direction)
        parts = [measure(side, shard) for shard in shards]
        for rank, shard in enumerate(shards):
            stats = {
                stat.name: reduced(stat, dim, [part[stat.name] for part in parts])
                if stat.block[dim] is None
                else parts[rank][stat.name]
                for stat in side.stats
            }
            offset = (rank * size, 0) if dim == 0 else (0, rank * size)
            encoded = encode(side, shard, stats, direction=direction, offset=offset)
            piece = whole.narrow(dim, rank * size, (rank + 1) * size)
            assert piece is not None
            what = f"{side}: shard {rank} of 3 of the {direction} operand, encoded with the reduced statistics"
            same_operand(encoded, piece, what)
