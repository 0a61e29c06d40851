"""JSON in which a name stands twice is refused wherever it is read: of two entries readers take either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lines import LPQ
from test_house import files

from lpq.checkpoint.errors import CheckpointError
from lpq.engines.config_files import read_json
from lpq.files.disk import json_of
from lpq.integrations.transformers import resume
from lpq.nn import Linear
from lpq.observe import NumericsError
from lpq.observe.readings import Readings
from lpq.registry.errors import LpqError
from lpq.train.errors import TrainError
from lpq.train.loop import records
from lpq.train.trainings import read_all

NET = Linear(32, 32, recipe=None)
OWN = ("lpq/engines/config_files.py", "lpq/files/disk.py", "lpq/train/taking_turns.py")
"""The function itself, and files that take apart what lpq itself has just put together."""
READERS: dict[str, tuple[str, Callable[[Path], Any], type[LpqError], str]] = {
    "config": ("config.json", read_json, CheckpointError, "config.json cannot be read: it has a name twice: "),
    "records": ("metrics.jsonl", records, TrainError, r"line 1, is broken \(it has a name twice: .step.\): restore it"),
    "readings": ("a.jsonl", Readings.read, NumericsError, "line 1: this is no reading"),
    "a curve": ("a-seed0.json", lambda path: read_all(path.parent), TrainError, r"no curve .* \(it has a name twice: "),
    "trainer": (
        "trainer_state.json", lambda path: resume(NET, path.parent), CheckpointError, "state.json .* a name twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_stands_twice(tmp_path: Path, reader: str) -> None:
    name, read, error, words = READERS[reader]
    (tmp_path / name).write_text('{"step": 1, "step": 2}\n')
    with pytest.raises(error, match=words):
        read(tmp_path / name)


def test_a_name_stands_once_in_each_table() -> None:
    assert json_of('{"a": {"a": [{"b": 1}, {"b": 2}]}}') == {"a": {"a": [{"b": 1}, {"b": 2}]}}
    with pytest.raises(ValueError, match="it has a name twice: 'b'"):
        json_of('[{"a": {"c": 1, "b": 1, "b": 1}}]')


def test_one_function_reads_all_json() -> None:
    names = [path for path in files("lpq/**/*.py") if "json.load" in path.read_text(encoding="utf-8")]
    assert [str(path.relative_to(LPQ.parent)) for path in names] == [*OWN]
