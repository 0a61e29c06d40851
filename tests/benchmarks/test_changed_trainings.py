"""The scripts that train with a change that no policy makes: what the change does, and from which step on."""

from __future__ import annotations

import torch
from support.examples import plugged

import lpq
from benchmarks import hot_channels
from benchmarks.trained import nothing, settings, trained


def test_hot_channels_are_found_after_a_quarter_of_the_steps() -> None:
    config = settings("toy", "4k", torch.device("cpu"), 0)
    with plugged("hot-channels"):
        found = hot_channels.train(0.1, 0, "4k")
    _, plain = trained("nvfp4", config, lpq.policy("nvfp4"), "", nothing, nothing)
    begin = config.validate_every
    assert found.losses[:begin] == plain.losses[:begin]
    assert found.losses[begin + 1 :] != plain.losses[begin + 1 :]
    assert found.policy.count("channels=") == 2 * 8, "x and w of each layer in forward"
