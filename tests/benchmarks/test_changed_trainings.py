"""The scripts that train with a change that no policy makes: what the change does, and from which step on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.examples import plugged
from torch import nn

import lpq
from benchmarks import hot_channels, oscillation
from benchmarks.trained import nothing, settings, trained
from lpq.optim import MasterWeights


def test_hot_channels_are_found_after_a_quarter_of_the_steps() -> None:
    config = settings("toy", "4k", torch.device("cpu"), 0)
    with plugged("hot-channels"):
        found = hot_channels.train(0.1, 0, "4k")
    _, plain = trained("nvfp4", config, lpq.policy("nvfp4"), "", nothing, nothing)
    begin = config.validate_every
    assert found.losses[:begin] == plain.losses[:begin]
    assert found.losses[begin + 1 :] != plain.losses[begin + 1 :]
    assert found.policy.count("channels=") == 2 * 8, "x and w of each layer in forward"


def test_a_master_is_reset_where_its_code_went_back_and_forth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oscillation, "EVERY", 10)
    monkeypatch.setattr(oscillation, "STEPS", 4)
    layer = lpq.convert(nn.Sequential(nn.Linear(16, 16, bias=False)), "nvfp4", weights="quantized")
    optimizer = MasterWeights(torch.optim.SGD(layer.parameters()))
    (master,) = optimizer.masters.values()
    resets = oscillation.Resets(10)

    def step(number: int, near_a_tie: float, on_its_way: float) -> None:
        master.fill_(6.0)
        master[0, 1], master[0, 2] = near_a_tie, on_its_way  # codes are 1 and 1.5 here, and a tie is at 1.25
        optimizer.encode()
        trainer: Any = SimpleNamespace(step=number, optimizer=optimizer)
        resets(trainer)

    with torch.no_grad():
        for number in range(5, 11):
            step(number, 1.24 if number % 2 else 1.26, 1.1 + 0.05 * number)
    assert master[0, 1].item() == 1.5
    assert master[0, 2].item() == pytest.approx(1.6)
    assert resets.shares == [1 / 256]


def test_weights_are_stored_with_masters_but_for_the_baseline() -> None:
    plain, stored = (oscillation.train(title, 0, "3k") for title in (oscillation.BASELINE, oscillation.PLAIN))
    assert (plain.baseline, stored.baseline) == (True, False)
    assert {**plain.settings, "weights": "quantized"} == stored.settings
    assert plain.losses != stored.losses
