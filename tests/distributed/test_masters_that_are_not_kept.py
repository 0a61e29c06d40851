"""``MasterWeights(keep=False)``: a step that changes nothing leaves the codes of a weight as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import fully_shard, on_ranks
from support.comparing import copy_bytes, equal
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

import lpq
from lpq.optim import MasterWeights
from lpq.torch_private.tensors import local_part


def _net(recipe: str) -> Any:
    torch.manual_seed(16)  # with which nvfp4 gives what it decodes to other codes
    net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    return lpq.convert(net, recipe, weights="quantized", ranks=2)


def _bytes(net: nn.Module) -> list[Tensor]:
    parts: list[Any] = [local_part(p) for p in net.parameters()]
    buffers = [b for part in parts for b in (part.buffers if hasattr(part, "buffers") else [part])]
    return [copy_bytes(buffer) for buffer in buffers]


def _stepped(recipe: str, net: Any) -> Any:
    """Steps that change nothing, and one that changes one element of the first weight, on the first rank."""
    optimizer = MasterWeights(torch.optim.SGD(net.parameters(), lr=0.0), keep=False)
    before = _bytes(net)
    for p in net.parameters() if recipe == "nvfp4" and not hasattr(net[0].weight, "device_mesh") else ():
        again = p.quantizer.quantize(p.dequantize(torch.float32))
        assert not equal(again.row.tensors(), p.row.tensors())
    gradients = [torch.zeros(p.shape) for p in net.parameters()]
    for rate, value in ((0.0, 1.0), (0.0, 0.0), (1.0, 1e3)):
        optimizer.param_groups[0]["lr"] = rate
        gradients[0][0, 0] = value
        for p, gradient in zip(net.parameters(), gradients, strict=True):
            sharded = hasattr(p, "device_mesh")
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if sharded else gradient
        optimizer.step()
        assert equal(_bytes(net), before) == (not rate)
    half = len(before) // 2
    assert equal(_bytes(net)[half:], before[half:]), "no element of the second weight changed"
    return net


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8", "nvfp4"])
def test_in_one_process(recipe: str) -> None:
    _stepped(recipe, _net(recipe))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
@on_ranks(2)
def test_two_ranks(rank: int, recipe: str) -> None:
    whole, net = _stepped(recipe, _net(recipe)), _net(recipe)
    for layer in (*net, net):
        fully_shard(layer)
    for part, all_of_it in zip(_stepped(recipe, net).parameters(), whole.parameters(), strict=True):
        values = local_part(part).dequantize()
        rows = len(values)
        assert torch.equal(values, all_of_it.dequantize()[rank * rows :][:rows]), "the ranks decide as one process does"
