"""The cost of a weight's gathers to the host: Python calls of lpq, and not time, with a GPU that does nothing.

A change that adds a call to the way from FSDP2's hooks to a gathered operand fails here, and so does one that adds a
call to what is done for a weight after a step. If it is worth its cost, raise the number and say why.
"""

from __future__ import annotations

import gc

import pytest
import torch
from imitated_gpu import calls_of, imitated_gpu
from ranks import fully_shard, spawn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lpq
from lpq.distributed import gathered_operand

SIZE, FEW, MORE, WARM = 256, 2, 5, 3
CALLS = {
    # recipe: the calls of one weight in a step: its gathers in forward and backward, what follows them, its layer
    # (``tests/nn/test_host_cost.py``), and its measurement after the optimizer's step.
    # As torch 2.13 counts them; where there are fewer, lower the number.
    "fp8-current": 187,
    "fp8-delayed": 222,
    "fp8-row": 186,
    "mxfp8": 161,
    "nvfp4": 229,
}


def calls(recipe: str, layers: int) -> int:
    """How many functions of lpq are called in one step of so many layers."""
    gc.collect()  # each step asks all models that are alive
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(layers)))
    lpq.convert(model, recipe, weights="high_precision")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    x = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16)

    def step() -> None:
        model(x).backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM):  # what is looked up once is looked up before
            step()
        return calls_of(step)


def each(recipe: str) -> float:
    """How many of these belong to each layer."""
    return (calls(recipe, MORE) - calls(recipe, FEW)) / (MORE - FEW)


def _counted(rank: int, recipe: str) -> None:
    with imitated_gpu():
        found = each(recipe)
        assert 0.95 * CALLS[recipe] < found <= CALLS[recipe], found


def _dearer(rank: int) -> None:
    as_bytes = gathered_operand.as_bytes

    def twice(tensor: Tensor) -> Tensor:
        as_bytes(tensor)
        return as_bytes(tensor)

    with imitated_gpu(), pytest.MonkeyPatch.context() as patch:
        usual = each("mxfp8")
        patch.setattr(gathered_operand, "as_bytes", twice)
        assert each("mxfp8") > usual


@pytest.mark.parametrize("recipe", CALLS)
def test_no_call_is_added(recipe: str) -> None:
    spawn(_counted, 2, recipe)


def test_what_is_added_is_noticed() -> None:
    spawn(_dearer, 2)
