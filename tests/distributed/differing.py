"""Models of ranks that differ: all raise, and say what differs where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import agreed, mesh_of
from support.small_models import shared_out
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq.observe import Collective, collectives

COMPARED = Collective("all_reduce", 32)
"""By which ranks see that all have the same input, or are at the same step of a policy."""
E5M2, OTHER_DY = "mxfp8(dtype=e5m2)", "x=mxfp8(), w=mxfp8(), dy=nvfp4()"
STAGED = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 2}, {"match": "*", "recipe": E5M2}]}
X = torch.ones(2, 32, 64)
SAID = "the ranks do not have the same model: "


def net(recipe: Any = "mxfp8", **how: Any) -> Any:
    """A model of two layers; without a recipe it is not converted."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return made if recipe is None else lpq.convert(made, recipe, **how)


def parallel(recipe: Any = "mxfp8", mesh: DeviceMesh | None = None) -> Any:
    """The same, with layers and sequences that ranks share out."""
    return parallelize_module(net(recipe), mesh or mesh_of(), shared_out("0", "2", 1))


def replicated(net: nn.Module) -> Any:
    return DistributedDataParallel(net, broadcast_buffers=False)


def training(net: nn.Module) -> Callable[[], Any]:
    """Steps of training it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        net(X).sum().backward()
        optimizer.step()

    return step


def refused(work: Callable[[], Any], *words: str, begins: str = SAID) -> None:
    """All ranks raise, in these words."""
    for said in agreed(work, RuntimeError):
        assert said.startswith(f"RuntimeError: {begins}rank "), said
        assert all(word in said for word in words), (words, said)
        assert said.endswith("alike on all ranks"), said


def compares(work: Callable[[], Any]) -> int:
    """How often ranks compare inputs or steps meanwhile."""
    with collectives() as seen:
        work()
    return seen.count(COMPARED)
