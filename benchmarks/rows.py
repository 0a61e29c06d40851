"""Rows of results: each is stored as soon as it is measured, and a run that was cut off can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
CUT = "the run ended while this was measured"
NAMES = ("layout", "library", "recipe", "compiled")
"""The keys that tell one row from another, as far as a part has them."""


class OtherSetting(Exception):
    """Rows that were measured in another setting than the ones which are to stand beside them."""


@dataclass(frozen=True)
class Task:
    """A row that is to be measured."""

    names: Row
    run: Callable[[], Row]
    """Measures the rest of the row; what cannot be measured is a row with its ``failure``."""


def one_by_one(tasks: Sequence[Task], setting: Row, before: Row | None = None) -> Iterator[Row]:
    """Yield the result before each task, in which the row stands as cut off, after each task, and at the end.

    ``before`` is the result of an earlier run: its rows are kept. Those that were cut off are measured again, after all
    others, since what cut them off may do so again.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    if before is not None:
        if other := {key for key, value in setting.items() if before.get(key) != value}:
            raise OtherSetting(f"the rows that are stored differ in {', '.join(sorted(other))}")
        rows = {_key(row): row for row in before["results"]}
    new = [task for task in tasks if _key(task.names) not in rows]
    again = [task for task in tasks if rows.get(_key(task.names), {}).get("failure") == CUT]
    for task in (*new, *again):
        key = _key(task.names)
        rows[key] = {**task.names, "peak_bytes": None, "failure": CUT}
        yield {**setting, "results": [*rows.values()]}
        began = time.monotonic()
        rows[key] = {**task.names, **task.run(), "seconds": round(time.monotonic() - began, 1)}
        yield {**setting, "results": [*rows.values()]}
    yield {**setting, "results": [*rows.values()]}


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in NAMES)
