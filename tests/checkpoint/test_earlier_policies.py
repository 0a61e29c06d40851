"""Checkpoints whose policy said nothing of what it left out, as those of an earlier lpq, which left out nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import lpq
from lpq.checkpoint.description import Description
from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.model import Model


def net(**how: str | None) -> nn.Module:
    layers = {"up": nn.Linear(32, 32), "lm_head": nn.Linear(32, 64)}
    return lpq.convert(nn.ModuleDict(layers), "mxfp8", **how)  # type: ignore[arg-type]


def earlier(*layers: str) -> Description:
    """Of one recipe, which these layers had."""
    policy = {"rules": [{"match": ["*"], "recipe": "mxfp8()"}]}
    said = Model(net()).describe({}, 1)
    return replace(said, conversions={"": {"policy": policy, "steps": None}}, recipes=dict.fromkeys(layers, "mxfp8()"))


def test_it_is_the_same_policy_if_it_reached_the_same_layers() -> None:
    Model(net()).check_policy(earlier("up"))
    Model(net(include="all")).check_policy(earlier("up", "lm_head"))
    for model, layers in ((net(), ("up", "lm_head")), (net(include="all"), ("up",))):
        with pytest.raises(CheckpointError, match="another policy"):
            Model(model).check_policy(earlier(*layers))
    other = lpq.convert(nn.ModuleDict({"up": nn.Linear(32, 32)}), "nvfp4")
    with pytest.raises(CheckpointError, match="another policy"):
        Model(other).check_policy(earlier("up"))
