"""The common parts of tests of layouts: the recipes, what a model is exported as, and comparisons over ranks."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from models import statics
from support.comparing import equal_states
from torch import Tensor, nn

import lpq
from lpq.torch_private.tensors import local_part

BATCHES, FEW = 5, 3
"""As many as 4 ranks, or 2, share unevenly."""
RECIPES = {
    "fp8-current": "max",
    "nvfp4": "percentile",
    "x=nvfp4(rht=true), w=nvfp4, dy=nvfp4(rht=true)": "four_over_six",
}
T = TypeVar("T")


def laid_out(layouts: list[T], method: str) -> list[T]:
    """All layouts for the method that costs least; the last two, in which each kind occurs, for one that counts inputs;
    and the last, where weights are cut most, for one that searches scales of weights."""
    return layouts if method == "max" else layouts[-2:] if method == "percentile" else layouts[-1:]


def exported(net: nn.Module, group: Any = None) -> dict[str, Tensor]:
    """The codes and scales of a model as engines get them, with those of inputs."""
    found = dict(lpq.export.stream(net, "compressed-tensors", process_group=group))
    assert any(name.endswith(("input_scale", "input_global_scale")) for name in found)
    return {name: value.view(torch.uint8) if value.itemsize == 1 else value for name, value in found.items()}


_groups: dict[str, Any] = {}


def of_one() -> Any:
    if "one" not in _groups:
        _groups["one"] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return _groups["one"][dist.get_rank()]


def whole_statics(net: Any) -> dict[str, Tensor]:
    return {name: local_part(value) for name, value in statics(net).items()}


def differs_on_some_rank(net: Any, expected: dict[str, Tensor]) -> bool:
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, equal_states(whole_statics(net), expected))
    return not all(found)
