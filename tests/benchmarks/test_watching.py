"""The benchmark of watched steps, of a small model on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lpq
from benchmarks import watching


def test_steps_that_are_said_to_be_watched_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    made, watches = lpq.observe.numerics, list[Any]()

    def numerics(*args: Any, **options: Any) -> Any:
        watches.append(made(*args, **options))
        return watches[-1]

    monkeypatch.setattr(lpq.observe, "numerics", numerics)
    monkeypatch.setattr(watching, "AROUND", 1)
    monkeypatch.setattr(watching, "ROUNDS", 2)
    step, _ = watching.measured("nvfp4", 1, 64, 64, torch.device("cpu"))
    assert step > 0
    assert {reading.step for reading in watches[0].readings()} == {0, 1, 2, 3, 4}, "three first, and one in each round"
