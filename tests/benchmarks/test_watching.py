"""The benchmark of watched steps, of a small model on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import watching


def test_a_watched_step_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(watching, "AROUND", 1)
    step, more = watching.measured("nvfp4", 1, 64, 64, torch.device("cpu"))
    assert step > 0
    assert more > 0
