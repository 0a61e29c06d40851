"""The kit's ranks do what ranks do: parts are those of the whole for any format, and not without a reduction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import counted_format
import odd_formats
import pytest
import residual_format
import subtle_formats as subtle
import torch
import whole_formats
from broken_formats import Plugin, RankLocal
from torch import Tensor

import lpq
from lpq import registry
from lpq.formats.format import Direction
from lpq.operations import reduce_statistics
from lpq.testing.conformance import test_declarations_can_be_read as check_declarations
from lpq.testing.conformance import test_encode_is_pure as check_pure
from lpq.testing.conformance import test_measure_returns_the_declared_statistics as check_measure
from lpq.testing.conformance import test_parts_are_encoded_as_in_the_whole as check_parts
from lpq.testing.conformance import test_ranks_encode_parts_as_in_the_whole as check_ranks
from lpq.testing.conformance.test_ranks import WAYS
from lpq.testing.ranks import Rank, on_ranks
from lpq.torch_private.collectives import all_reduce, arrived, begin_all_gather

MIXED = "odd_mixed"
"""It stores sums of neighbours, and does not say so."""
ODD = (
    "counted",
    "oldcounts",
    "residual(base=fp8, rest=mxfp8)",
    "hybrid(row=fp8(scaling=delayed), col=fp8(scaling=delayed), col_source=row)",
    "hybrid(row=mxfp8, col=fp8(scaling=delayed), col_source=row)",
    "hybrid(row=fp8(scaling=delayed), col=nvfp4(stochastic=true), col_source=row)",
    "hybrid(row=nvfp4, col=nvfp4(stochastic=eden), col_source=row)",
    "hybrid(row=nvfp4, col=nvfp4(stochastic=eden, scaling=delayed), col_source=row)",
    "hybrid(row=nvfp4(stochastic=true), col=fp8(scaling=row))",
    "hybrid(row=nvfp4(stochastic=true), col=fp8, col_source=row)",
    "hybrid(row=fp8(static=true), col=nvfp4(static=true))",
    *(name for name in whole_formats.NAMES if name != "whole_codebook"),  # which encodes no empty matrix
    *(name for name in odd_formats.NAMES if name != MIXED),
)
"""What the formats that ship are not, and hybrids of which the kit tries others. ``test_third_parties`` has more."""
SCALED = "fp8", "fp8(scaling=row)", "fp8(scaling=delayed)", "nvfp4(stochastic=true)"
"""Formats of which a statistic spans parts in both directions."""


@pytest.fixture(autouse=True)
def third_parties() -> Iterator[None]:
    for formats in (counted_format, odd_formats, residual_format, whole_formats):
        formats.register()
    counted_format.register_old()
    registry.register(Plugin(RankLocal, subtle.IgnoresItsPlace, names="subtle_{}"), name="subtle")
    yield
    registry.refresh()


def check(text: str) -> None:
    """Run the kit's property on a format."""
    quantizer = lpq.quantizer(text)
    for way in WAYS:
        check_ranks(quantizer, way)


@pytest.mark.parametrize("text", ODD)
def test_parts_of_any_format_are_those_of_the_whole(text: str) -> None:
    check(text)


@pytest.mark.parametrize("text", ["counted", "oldcounts"])
@pytest.mark.parametrize("direction", ["row", "col"])
def test_the_kit_reduces_counts_by_sum_and_a_second_round_by_the_first(direction: Direction, text: str) -> None:
    side = lpq.quantizer(text).side(direction)
    check_parts(side, direction)
    check_pure(side)
    check_declarations(side)
    check_measure(side)


@pytest.mark.parametrize("text", SCALED)
@pytest.mark.parametrize("way", WAYS)
def test_without_the_reduction_they_are_not(text: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_statistics, "reduce_max", lambda values, group, **how: list(values))
    with pytest.raises(AssertionError, match=r"differ|remembers"):
        check_ranks(lpq.quantizer(text), way)


def test_without_the_sum_of_counts_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_statistics, "reduce_sum", lambda values, group: list(values))
    with pytest.raises(AssertionError, match="differ"):
        check("counted")


def test_a_maximum_that_loses_a_nan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = reduce_statistics.reduce_max

    def losing(values: Sequence[Tensor], group: str, **how: bool) -> list[Tensor]:
        return reduce([v.nan_to_num(0.0, torch.inf) if v.is_floating_point() else v for v in values], group, **how)

    monkeypatch.setattr(reduce_statistics, "reduce_max", losing)
    with pytest.raises(AssertionError, match="a NaN in the last part"):
        check("fp8")


@pytest.mark.parametrize("text", ["subtle_ranklocal", "subtle_ignoresitsplace", MIXED])
def test_a_format_whose_parts_are_no_parts_is_found(text: str) -> None:
    """One takes a scale of the part alone, one draws random bits by places in the part, and one mixes neighbours."""
    with pytest.raises(AssertionError, match=r"rank 0, buffer 'data': \d+ of \d+ elements differ"):
        check(text)


def test_parts_of_an_operand_are_not_those_of_the_whole_without_the_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_statistics, "reduce_max", lambda values, group, **how: list(values))
    for text in SCALED:
        with pytest.raises(AssertionError, match="statistic"):
            check_parts(lpq.quantizer(text).side("col"), "col")


def test_ranks_meet_in_collectives() -> None:
    """And an error of one is raised, and keeps no other waiting."""

    def run(group: Rank) -> tuple[list[int], list[int]]:
        mine = torch.tensor([group.rank(), -group.rank()])
        largest = all_reduce(mine, "max", group.group_name)
        summed = all_reduce(mine, "sum", group.group_name)
        (gathered,) = arrived(begin_all_gather([summed], group.size(), group.group_name))
        return largest.tolist(), gathered.tolist()

    def failing(group: Rank) -> tuple[list[int], list[int]]:
        if group.rank() == 1:
            raise ValueError("this one")
        return run(group)

    assert on_ranks([run] * 3) == [([2, 0], [3, -3] * 3)] * 3
    with pytest.raises(ValueError, match="this one"):
        on_ranks([failing] * 3)
