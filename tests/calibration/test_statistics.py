"""Statistics of several ranks: the largest and the sums, with one collective for each, and ranks with other ones."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

from lpq.calibration import CalibrationError
from lpq.calibration.statistics import Statistics, Together, reduce
from lpq.observe import collectives

RANKS = 3


def own(rank: int, special: float | None) -> Tensor:
    made = torch.rand(RANKS, 2, 3, generator=torch.Generator().manual_seed(5))
    if special is not None:
        made[1, 0, 2] = special
    return made[rank]


@on_ranks(RANKS)
def test_each_statistic_is_reduced_over_all_ranks_in_one_collective_for_each_kind(rank: int) -> None:
    """Against a direct maximum of bits and a sum. NaN is not lost; each way of combining takes one collective."""
    ranks, everyone = Together(), range(RANKS)
    for special in (None, float("nan"), float("inf")):
        statistics = Statistics()
        for i in range(4):
            statistics.take(f"{i}.m", own(rank, special) * (i + 1))
            statistics.take(f"{i}.s", torch.tensor([1, rank * i]))
        with collectives() as calls:
            reduced = reduce(statistics, ranks)
        assert [call.bytes for call in calls if call.kind == "all_reduce"] == [24 * 4, 8 * 8]
        for i in range(4):
            bits = torch.stack([own(r, special) * (i + 1) for r in everyone]).view(torch.int32).amax(0)
            assert torch.equal(reduced[f"{i}.m"].view(torch.int32), bits)
            assert reduced[f"{i}.s"].tolist() == [RANKS, sum(everyone) * i]


@on_ranks(RANKS)
def test_ranks_with_other_statistics_all_raise_and_say_which(rank: int) -> None:
    found = Statistics()
    found.take("both.x_amax", torch.ones(()))
    if rank != 2:
        found.take("down.x_amax", torch.ones(()))
    with pytest.raises(CalibrationError, match=r"rank 0 has \[down\.x_amax max .*, and rank 2 has \[none\]"):
        reduce(found, Together())


def test_one_process_has_its_own() -> None:
    found = Statistics()
    found.take("m", torch.ones(2))
    assert torch.equal(reduce(found, Together())["m"], torch.ones(2))


def test_a_statistic_is_a_maximum_or_an_exact_count() -> None:
    with pytest.raises(TypeError, match=r"mean: a statistic is of one of .*, and this is torch\.float64"):
        Statistics().take("mean", torch.ones((), dtype=torch.float64))
