"""Parts of an operand: ``encode(part) == part(encode(whole))``, whatever the size of a part and wherever it lies.

Parts belong to ranks, which are threads here and reduce statistics by the same collectives. ``test_ranks`` has the
operands that ranks encode, gather and remember, ``test_groups`` the parts that have statistics of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from lpq.distributed.masters import beside_zeros
from lpq.formats import Quantizer, Storage
from lpq.formats.blocks import block_amax
from lpq.formats.format import DIRECTIONS, Direction
from lpq.formats.layout import DIMENSIONS
from lpq.operations.measuring import measure_again, measure_reference
from lpq.operations.reduce_statistics import bind_reduction
from lpq.operations.sides import measures_again
from lpq.testing.expect import one_nan, same, same_decoded, same_operand
from lpq.testing.operands import SEED, encode, normal, sides, unit
from lpq.testing.options import only
from lpq.testing.ranks import Rank, on_ranks
from lpq.testing.table import DTYPES, SQUARE

WHOLE = 128 * 3 * 5 * 7
"""Rows or columns of the largest whole, at least: it has whole tiles of 128, and of most numbers below."""
NARROW, WIDE = 8, 40
"""The number of columns of the largest whole, and of others, if they are cut along rows, or of rows."""
MOST = 64
"""Each number of units up to this is the size of a part, where the largest whole has room for it."""
MASTER = 48
"""Rows and columns of a master, at least."""


def declares_what_follows(quantizer: Quantizer) -> bool:
    """Whether some buffer of an operand follows from statistics."""
    return any(buffer.from_stats for side in sides(quantizer) for buffer in side.layout)


def sizes_of_parts(side: Quantizer, dim: int) -> Iterator[tuple[list[int], int]]:
    """Yield the sizes of the parts of one matrix after the other, two to four each, and the size of its other
    dimension: 1, 2, 3, … times the unit at which an operand can be cut, in a random order, and the rest of the largest
    matrix. One part is empty, and one a large square.

    A format that depends on the size of a matrix, as where 5 rows share a scale if there are whole fives, is thereby
    tried with each small size, be it odd or prime, and at places that are no multiples of it.
    """
    step = unit(side, dim)
    room = max(7, -(-WHOLE // step))
    most = next(n for n in range(MOST, 0, -1) if n * (n + 1) // 2 < room)
    order = iter([n * step for n in (torch.randperm(most, generator=torch.Generator().manual_seed(SEED)) + 1).tolist()])
    first = list(itertools.islice(order, 3))
    yield [*first, room * step - sum(first)], NARROW
    for ranks in itertools.cycle((2, 3, 4)):
        if not (sizes := list(itertools.islice(order, ranks))):
            break
        yield sizes if len(sizes) > 1 else [*sizes, 0, step], WIDE
    yield [square := -(-SQUARE // step) * step, step], square


def part_that_differs(x: Tensor, parts: tuple[Tensor, ...], number: int) -> str:
    """Give the first part of a matrix larger values than the others have, and the last part odd values; return words
    for that."""
    parts[0].mul_(37)
    if number % 3 == 0 or not parts[-1].numel():
        return "an outlier in the first part"
    if number % 3 == 1:
        parts[-1][-1, -1] = torch.nan
        return "a NaN in the last part"
    parts[-1].mul_(0)
    return "zeros of both signs in the last part"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_parts_are_encoded_as_in_the_whole(side: Quantizer, direction: Direction) -> None:
    """Statistics that are measured part by part and reduced equal the statistics of the whole. With them, and its place
    for random bits, a part has the bytes that it has in the whole: rows of a row operand, and columns of a column
    operand.

    A format that takes a scale from the part itself, not from ``stats``, fails here: ranks would disagree. So does one
    whose values share a scale beyond what a buffer or statistic is declared to cover.
    """
    dim = DIRECTIONS.index(direction)
    if (reason := side.why_no_parts(dim)) is not None:
        pytest.skip(f"it has no parts: {reason}")
    spanning = [stat for stat in side.stats if stat.block[dim] is None]
    alike = bool(spanning)
    for number, (sizes, wide) in enumerate(sizes_of_parts(side, dim)):
        x = normal(*((sum(sizes), wide) if dim == 0 else (wide, sum(sizes))), dtype=DTYPES[number % 3])
        parts = torch.split(x, sizes, dim)
        holds = part_that_differs(x, parts, number)
        begins = [sum(sizes[:rank]) for rank in range(len(sizes))]
        alone = [partial(_encoded, side, dim, *part) for part in zip(parts, begins, strict=True)]
        results = on_ranks(alone)
        stats, whole = _encoded(side, dim, x, 0, None)
        compare, decoded = same_operand if x.isfinite().all() else same_decoded, whole.decode()
        for (part_stats, piece), begin, size in zip(results, begins, sizes, strict=True):
            what = (
                f"{side}: {size} {DIMENSIONS[dim]} from {begin} on, of the {sum(sizes)} of a {direction} operand in "
                f"{x.dtype}, with {holds}, with statistics reduced over parts of {sizes}"
            )
            for stat in side.stats:
                step, statistic = stat.block[dim], stats[stat.name]
                statistic = statistic if step is None else statistic.narrow(dim, begin // step, -(-size // step))
                covers = f"one value covers {stat.block}, as stats declares, whatever the size"
                same(one_nan(part_stats[stat.name]), one_nan(statistic), f"{what}: statistic {stat.name!r} ({covers})")
            expected = whole.narrow(dim, begin, begin + size)
            assert expected is not None, (
                f"{what}: these lie on whole blocks of the layout, and cannot be taken from the operand: let narrow "
                "follow from the blocks, as Storage does"
            )
            rule = "take scales from stats, and let no value share one beyond its block, whatever the size"
            compare(piece, expected, f"{what} ({rule})")
            if number == 0:
                apart, within = one_nan(piece.decode()), one_nan(decoded.narrow(dim, begin, size))
                same(apart, within, f"{what}, decoded alone and in the whole (decode each element by its block alone)")
        if alike and number % 3 == 0:
            own = [of_part(None)[1].decode() for of_part in alone]
            alike = all(torch.equal(one, piece.decode()) for one, (_, piece) in zip(own, results, strict=True))
    assert not alike, (
        f"{side}: parts encode alike with their own statistics and with the reduced ones, so the statistic that "
        f"spans them, {spanning[0].name!r}, is of no use: take the scale from it, or do not declare it"
    )


def _encoded(side: Quantizer, dim: int, x: Tensor, begin: int, group: Rank | None) -> tuple[dict[str, Tensor], Storage]:
    """The statistics of a matrix or of a part that begins at this row or column, reduced if there is a group, and the
    operand."""
    along = [(stat, dim) for stat in side.stats]
    stats = measure_reference(x, side, None)
    if group is not None:
        bind_reduction([along], group, 1)([stats], None)
    if measures_again(side, None):
        stats = measure_again(x, side, None, stats)
        if group is not None:
            bind_reduction([along], group, 2)([stats], None)
    by_name = stats_by_name(side, stats)
    offset = (begin, 0) if dim == 0 else (0, begin)
    return by_name, encode(side, x, by_name, direction=DIRECTIONS[dim], offset=offset)


@only(declares_what_follows, "declares buffers that follow from statistics")
def test_parts_of_a_master_are_cast_as_the_whole(quantizer: Quantizer) -> None:
    """Ranks with shards of a master weight, cut anywhere, take zeros for the elements of others, and exchange
    statistics where ``Buffer.from_stats`` is declared.

    A format whose zeros raise a statistic, or whose codes depend on elements beyond their blocks, fails here.
    """
    size = MASTER + 2 * max(unit(side, dim) for side in sides(quantizer) for dim in (0, 1)) + 3
    x = normal(size, size)
    place = torch.arange(x.numel()).view(x.shape)
    parts = place < x.numel() // 2 + 1, place >= x.numel() // 2 + 1  # which cuts a row
    for side in filter(beside_zeros, sides(quantizer)):
        what = f"{side}: each of two parts of a master {list(x.shape)} beside zeros"
        whole, *part_stats = (measure_reference(matrix, side, None) for matrix in (x, *(x * own for own in parts)))
        for stat, of_whole, *of_parts in zip(side.stats, whole, *part_stats, strict=True):
            same(
                torch.maximum(*of_parts),
                of_whole,
                f"{what}: the larger statistic {stat.name!r}, which zeros may not raise",
            )
        stats = stats_by_name(side, whole)
        whole_buffers = encode(side, x, stats).buffers()
        for own in parts:
            part_buffers = encode(side, x * own, stats).buffers()
            for buffer in side.layout:
                one, other = part_buffers[buffer.name], whole_buffers[buffer.name]
                if not buffer.from_stats:  # those whose block is in the part, but for what pads lines
                    complete = block_amax((~own).float(), buffer.block) == 0
                    lattice = tuple(map(slice, complete.shape))
                    one, other = one[lattice][complete], other[lattice][complete]
                same(one, other, f"{what}, with the statistics of the whole: {buffer.name}")


def stats_by_name(side: Quantizer, stats: list[Tensor]) -> dict[str, Tensor]:
    return {stat.name: value for stat, value in zip(side.stats, stats, strict=True)}
