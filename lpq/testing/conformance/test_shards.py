"""Sharding in miniature: with statistics that are combined, each shard encodes to its piece of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lpq.formats import Quantizer, Stat
from lpq.formats.format import Direction
from lpq.formats.layout import DIMENSIONS
from lpq.testing.comparing import compare_cast
from lpq.testing.expect import same, same_operand
from lpq.testing.operands import DIRECTIONS, SEED, encode, measure, normal, sides, unit
from lpq.testing.options import only

WHOLE = 128 * 3 * 5 * 7
"""Rows or columns of the whole, at least: it has whole tiles of 128, and of most numbers below."""
MOST = 64
"""Each number of units up to this is the size of a shard, where the whole has room for so many."""
MASTER = 48
"""Rows and columns of a master, at least."""


def declares_what_follows(quantizer: Quantizer) -> bool:
    """Whether some buffer of an operand follows from statistics."""
    return any(buffer.from_stats for side in sides(quantizer) for buffer in side.layout)


def sizes(side: Quantizer, dim: int) -> list[int]:
    """The sizes of shards, in a random order: 1, 2, 3, … times the unit at which an operand can be cut, and the rest.

    A format that depends on the size of a matrix, as where 5 rows share a scale if there are whole fives, is thereby
    tried with each small size, be it odd or prime, and at places that are no multiples of it.
    """
    step = unit(side, dim)
    room = max(7, -(-WHOLE // step))
    most = next(n for n in range(MOST, 0, -1) if n * (n + 1) // 2 < room)
    shards = [*range(1, most + 1), room - most * (most + 1) // 2]
    order = torch.randperm(len(shards), generator=torch.Generator().manual_seed(SEED)).tolist()
    return [step * shards[i] for i in order]


def sharded(side: Quantizer, dim: int) -> tuple[Tensor, list[Tensor], list[int]]:
    """A matrix, its shards along a dimension of the operand, and where each begins.

    One shard has an outlier, so that whatever is computed from a shard alone shows.
    """
    if (reason := side.why_no_parts(dim)) is not None:
        pytest.skip(f"it is not sharded so: {reason}")
    parts = sizes(side, dim)
    x = normal(sum(parts), 40) if dim == 0 else normal(40, sum(parts))
    shards = list(torch.split(x, parts, dim))
    shards[1].mul_(37)
    return x, shards, [sum(parts[:rank]) for rank in range(len(parts))]


def reduced(stat: Stat, dim: int, parts: list[Tensor]) -> Tensor:
    """A statistic of all ranks: the MAX, or the sum, where an element covers several shards, else side by side."""
    if stat.block[dim] is not None:
        return torch.cat(parts, dim)
    return torch.stack(parts).sum(0) if stat.reduce == "sum" else torch.stack(parts).amax(0)


def measured(side: Quantizer, dim: int, shards: list[Tensor]) -> list[dict[str, Tensor]]:
    """The statistics of shards, not yet combined; those of round 2 by the combined ones of round 1."""
    parts = [measure(side, shard) for shard in shards]
    first = [stat for stat in side.stats if stat.round == 1]
    if len(first) == len(side.stats):
        return parts
    known = {s.name: reduced(s, dim, [part[s.name] for part in parts]) for s in first if s.block[dim] is None}
    own = [{s.name: part[s.name] for s in first} for part in parts]
    return [stats | side.measure_again(shard, stats | known) for shard, stats in zip(shards, own, strict=True)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@only(lambda side: bool(side.stats), "measures statistics")
def test_statistics_of_shards_are_those_of_the_whole(side: Quantizer, direction: Direction) -> None:
    """Measured locally and reduced equals measured on the whole, for row and for column operands, whatever the size."""
    dim = DIRECTIONS.index(direction)
    x, shards, _ = sharded(side, dim)
    first = unit(side, dim)
    for whole in [*sorted(shards, key=Tensor.numel), x]:
        parts = [part for part in whole.tensor_split([first], dim) if part.numel()]
        wanted, found = measure(side, whole), measured(side, dim, parts)
        size = whole.shape[dim]
        for stat in side.stats:
            values = [part[stat.name] for part in found]
            what = (
                f"{side}: statistic {stat.name!r} of the {size} {DIMENSIONS[dim]} of a {direction} operand, reduced "
                f"over shards of {first} and {size - first} (one value covers {stat.block}, as stats declares, "
                "whatever the size)"
            )
            same(reduced(stat, dim, values), wanted[stat.name], what)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_shard_is_its_piece_of_the_whole(side: Quantizer, direction: Direction) -> None:
    """With reduced statistics, and its offset for random bits, a shard has the bytes of its place.

    A format that takes a scale from the shard itself, not from ``stats``, fails here: ranks would disagree. So does one
    whose values share a scale beyond what a buffer or statistic is declared to cover.
    """
    dim = DIRECTIONS.index(direction)
    x, shards, starts = sharded(side, dim)
    whole, parts = encode(side, x, direction=direction), measured(side, dim, shards)
    spanning = [stat for stat in side.stats if stat.block[dim] is None]
    combined = {stat.name: reduced(stat, dim, [part[stat.name] for part in parts]) for stat in spanning}
    alike = bool(spanning)
    for rank, (shard, start) in enumerate(zip(shards, starts, strict=True)):
        offset = (start, 0) if dim == 0 else (0, start)
        stop = start + shard.shape[dim]
        piece = whole.narrow(dim, start, stop)
        assert piece is not None, (
            f"{side}: {DIMENSIONS[dim]} [{start}, {stop}) lie on whole blocks of the layout, and cannot be taken from "
            "the operand: let narrow follow from the blocks, as Storage does"
        )
        what = (
            f"{side}: {stop - start} {DIMENSIONS[dim]}, [{start}, {stop}) of the {x.shape[dim]} of a {direction} "
            "operand, encoded with the reduced statistics (take scales from stats, and let no value share one beyond "
            "its block, whatever the size)"
        )
        same_operand(encode(side, shard, parts[rank] | combined, direction=direction, offset=offset), piece, what)
        if alike:
            own = encode(side, shard, direction=direction, offset=offset).decode()
            alike = torch.equal(own, piece.decode())
    assert not alike, (
        f"{side}: shards encode alike with their own statistics and with the reduced ones, so the statistic that "
        f"spans them, {spanning[0].name!r}, is of no use: take the scale from it, or do not declare it"
    )


@only(declares_what_follows, "declares buffers that follow from statistics")
def test_parts_of_a_master_are_cast_as_the_whole(quantizer: Quantizer) -> None:
    """Ranks that share out a master weight, anywhere, exchange statistics where ``Buffer.from_stats`` is declared.

    A format whose zeros raise a statistic, or whose codes depend on elements beyond their blocks, fails here.
    """
    size = MASTER + 2 * max(unit(side, dim) for side in sides(quantizer) for dim in (0, 1)) + 3
    assert compare_cast(quantizer, normal(size, size)), f"{quantizer}: {size} rows and columns make no two parts"
