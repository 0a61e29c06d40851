"""The cost of a weight's gather to the host: calls of ``lpq.distributed``, and not time.

A change that adds a call to the way from FSDP2's hooks to a gathered operand fails here. If it is worth its cost, raise
the number and say why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fully_shard, spawn
from torch import nn

import lpq
from lpq.distributed import model_gathers

OURS = str(Path(model_gathers.__file__).parent)
SIZE, FEW, MORE = 64, 2, 5
CALLS = {"fp8-current": 48, "mxfp8": 52, "nvfp4": 50}
"""Of one weight's gathers in forward and backward, and of what follows them, of a step after the first ones."""


def calls(recipe: str, layers: int) -> int:
    """How many functions of ``lpq.distributed`` are called in one step of so many layers."""
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    lpq.convert(model, recipe, weights="high_precision")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    count = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        comprehension = frame.f_code.co_name.startswith("<")  # which is a call before Python 3.12
        count += event == "call" and not comprehension and frame.f_code.co_filename.startswith(OURS)

    with torch.autograd.set_multithreading_enabled(False):
        for step in range(4):  # what is looked up once is looked up before
            sys.setprofile(see if step == 3 else None)
            try:
                model(x).sum().backward()
            finally:
                sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()
    return count


def _count(rank: int, recipe: str) -> None:
    found = (calls(recipe, MORE) - calls(recipe, FEW)) / (MORE - FEW)
    assert CALLS[recipe] / 2 < found <= CALLS[recipe], found


@pytest.mark.parametrize("recipe", CALLS)
def test_no_call_is_added(recipe: str) -> None:
    spawn(_count, 2, recipe)
