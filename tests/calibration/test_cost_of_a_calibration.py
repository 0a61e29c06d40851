"""The cost to the host of a calibration for each layer: how often something is done, and not its time."""

from __future__ import annotations

import pytest
from torch import nn

import lpq
from lpq.calibration.targets import targets
from lpq.formats import Quantizer


def test_layers_with_one_recipe_freeze_its_quantizers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new quantizer is checked, which took as long as the pass of a batch."""
    checked: list[Quantizer] = []
    ready = Quantizer.ready
    monkeypatch.setattr(Quantizer, "ready", lambda self: checked.append(self) or ready(self))

    def calibrated(count: int) -> int:
        layers = lpq.convert(nn.Sequential(*(nn.Linear(64, 64) for _ in range(count))), "fp8-current")
        checked.clear()
        assert len(targets(layers, None)) == count
        return len(checked)

    assert 0 < calibrated(8) == calibrated(2)
