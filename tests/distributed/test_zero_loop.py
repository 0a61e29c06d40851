"""The ZeRO-1 loop of the page on sharding: on two ranks it gives the bits of the same training in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from sharded import bytes_of
from support.comparing import equal_states
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor

PAGE = Path(__file__).parents[2] / "docs" / "distributed-optimizer.md"


def _source() -> str:
    """The block of the page that is the file of the loop."""
    found = re.search(r'^```python title="zero\.py"\n(.*?)^```$', PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None
    return found[1]


def _of_one_process() -> list[dict[str, Tensor]]:
    """The bytes of the weights before the loop, and after each step of a loop that knows of no other rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.GELU(), nn.Linear(96, 64, bias=False))
    masters = [w.detach().clone() for w in model.parameters()]
    lpq.convert(model, "mxfp8", weights="quantized")
    weights = [w for w in model.parameters() if isinstance(w, QuantizedTensor)]
    found = [bytes_of(weights)]
    for _ in range(3):
        x = torch.randn(32, 64)
        (model(x) - x).square().mean().backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master -= 0.1 * weight.grad.float()
            weight.data.copy_(master)
        model.zero_grad()
        found.append(bytes_of(weights))
    return found


@on_ranks(2)
def test_two_ranks_train_as_one_process(rank: int) -> None:
    names: dict[str, list[QuantizedTensor]] = {}
    with pytest.MonkeyPatch.context() as patch:  # the ranks have a group, and keep it
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        exec(compile(_source(), "zero.py", "exec", dont_inherit=True), names)
    before, *_, after = _of_one_process()
    made = bytes_of(names["weights"])
    assert equal_states(made, after)
    assert not equal_states(made, before)
