"""Observers on a GPU: a step computes the same, nothing waits for the device, and recording a graph is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparing import equal
from torch import Tensor, nn

import lpq
from lpq.observe import Observed, observing


class Errors:
    """The largest error of each operand, on the device."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def observe(self, seen: Observed) -> None:
        if seen.name == "y":
            return
        value = seen.value.float()
        self.found += [
            (operand - value).abs().amax() / value.abs().amax() for operand in seen.decoded() if operand is not None
        ]
        self.found += [value.amax() for value in seen.statistics().values()]


def made(recipe: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", torch.bfloat16)
    return lpq.convert(net, recipe), torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)


def step(net: Any, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    net.zero_grad()
    y = net(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"])
def test_a_step_is_the_same_and_waits_for_nothing(recipe: str) -> None:
    (alone, x), (net, _) = made(recipe), made(recipe)
    expected, errors = step(alone, x), Errors()
    with observing(net, errors):
        first = step(net, x)
        step(alone, x)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            step(net, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert equal(first, expected)
    assert equal(step(net, x), step(alone, x))
    assert len(errors.found) > 20
    assert all(bool(error.isfinite()) for error in errors.found)


def test_a_graph_that_is_recorded_is_refused_and_nothing_is_lost() -> None:
    net, x = made("fp8-current")
    with torch.no_grad():
        expected = net(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        refused = pytest.raises(RuntimeError, match=r"layer 0, .*: a CUDA graph is recorded")
        with observing(net, Errors()), refused, torch.cuda.graph(graph):
            net(x)
        assert torch.equal(net(x), expected)
