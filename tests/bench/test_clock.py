"""The clock of ``lpq bench`` and of the benchmarks."""

from __future__ import annotations

from lpq.bench.timing import Effort, Timing, on_host


def test_a_timing_is_the_median_and_its_range() -> None:
    timing = Timing.of([3.0, 1.0, 2.0])
    assert timing.record("ms") == {"ms": 2000.0, "fastest_ms": 1000.0, "slowest_ms": 3000.0}


def test_contenders_take_turns_in_changing_order() -> None:
    seen: list[str] = []
    steps = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    taken = on_host(steps, Effort(rounds=6, steps=1), lambda: None)
    each = ["".join(seen[i : i + 9 : 3]) for i in range(0, len(seen), 9)]  # two steps to lead and one that is timed
    assert set(taken) == set("abc")
    assert all(sorted(order) == list("abc") for order in each)
    assert len(set(each)) > 1
