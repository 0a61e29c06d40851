"""Meetings in a store: whether all came is the same for all, however they come, and nothing of a meeting is left."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

from lpq.distributed import meeting

RANKS = (0, 1, 5)


@pytest.fixture
def store() -> Iterator[dist.HashStore]:
    made = dist.HashStore()
    with (
        mock.patch.object(meeting, "job_store", return_value=made),
        mock.patch.object(meeting, "limit", return_value=5.0),
        warnings.catch_warnings(action="error"),
    ):
        yield made


def _met(texts: list[str], late: float = 0.0, seconds: float | None = 5.0) -> list[bool | None]:
    """What each rank is told. The last one comes so many seconds after the others."""

    def come(number: int) -> bool | None:
        if number == len(texts) - 1:
            time.sleep(late)
        return meeting.meet(RANKS, "a test", texts[number], seconds, "this rank waits")

    with ThreadPoolExecutor(len(texts)) as threads:
        return [*threads.map(come, range(len(texts)))]


def test_all_hear_whether_their_texts_are_equal(store: dist.HashStore) -> None:
    for _ in range(3):
        assert _met(["a", "a", "a"]) == [True] * 3
        for texts in (["a", "b", "a"], ["a", "a", ""], ["a", "b", "c"]):
            assert _met(texts) == [False] * 3


def test_where_one_is_late_all_go_on_and_meet_the_next_time(store: dist.HashStore) -> None:
    assert _met(["a", "a", "b"], late=0.4, seconds=0.1) == [None] * 3
    assert _met(["a", "a"], seconds=0.1) == [None] * 2, "one of them never comes"
    assert _met(["a", "a", "a"]) == [True] * 3
    assert _met(["a", "b", "a"], late=0.2) == [False] * 3


def test_a_rank_that_waits_for_all_outlasts_those_that_do_not(store: dist.HashStore) -> None:
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(meeting.meet, RANKS[:2], "", "a", None, "this rank waits")
        time.sleep(0.1)
        assert meeting.meet(RANKS, "", "a", 0.1, "") is None, "other ranks"
        assert meeting.meet(RANKS[:2], "another thing", "a", 0.1, "") is None
        assert meeting.meet(RANKS[:2], "", "a", 0.1, "") is True
        assert waits.result() is True


def test_a_rank_that_waits_long_says_so(store: dist.HashStore) -> None:
    with mock.patch.object(meeting, "PATIENCE", 0.1), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert meeting.meet(RANKS, "", "a", 0.3, "this rank waits") is None
    assert [str(one.message) for one in seen] == ["this rank waits"]


def test_a_word_is_there_until_all_have_met(store: dist.HashStore) -> None:
    assert not meeting.is_told(RANKS, "a test")
    meeting.tell(RANKS, "a test")
    assert _met(["a", "a"], seconds=0.1) == [None] * 2
    assert meeting.is_told(RANKS, "a test")
    assert not meeting.is_told(RANKS, "another one")
    assert _met(["a", "a", "a"]) == [True] * 3
    assert not meeting.is_told(RANKS, "a test")


def test_the_store_does_not_grow(store: dist.HashStore) -> None:
    sizes = set()
    for _ in range(4):
        _met(["a", "b"], seconds=0.01)
        _met(["a", "a"], seconds=0.01)
        _met(["a", "b", "a"])
        sizes.add(store.num_keys())
    assert len(sizes) == 1, sizes
