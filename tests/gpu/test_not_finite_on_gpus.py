"""A weight that a step makes NaN on a GPU is named at the next step, and the host waits for nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import lpq
from lpq.optim import MasterWeights


@pytest.mark.parametrize("masters", [False, True])
def test_it_is_said_at_the_next_step(masters: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).cuda()
    lpq.convert(net, "mxfp8", weights="quantized")
    optimizer = MasterWeights(AdamW(net.parameters(), lr=1e-2), keep=masters)
    said: list[list[str]] = []
    for number in range(5):
        for i, layer in enumerate(net):
            layer.weight.grad = torch.full((256, 256), 0.01, device="cuda")
            if (number, i) == (2, 1):
                layer.weight.grad[17, 23] = torch.nan
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # so that the host is ahead of the step, as it is in training
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("error" if number else "default")  # in the first step state is made
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        said.append([str(w.message) for w in found if "made weights NaN" in str(w.message)])
    assert [len(s) for s in said] == [0, 0, 0, 1, 0]
    assert "stored quantized: 1.weight." in said[3][0]
