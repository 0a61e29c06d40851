"""DeepSpeed's engine trains a converted model as a loop of one's own does, on one process of a CPU."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

import lpq

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed: Any = pytest.importorskip("deepspeed", reason="needs DeepSpeed, which `make test-loops` brings")
pytestmark = [pytest.mark.slow, pytest.mark.starts]
ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    # an extension for all-reduce among processes of one machine, which would be compiled for minutes first
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("gloo")


@pytest.mark.parametrize("policy", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_engine_takes_the_steps_of_a_loop(one_process: None, stage: int, policy: str) -> None:
    torch.manual_seed(0)
    model = lpq.convert(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), policy)
    by_hand = copy.deepcopy(model)
    x = torch.randn(16, 64)
    y = x.roll(1, -1)
    config = {
        "train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2)
    torch.manual_seed(1)  # which also seeds the noise of NVFP4's rounding
    expected = []
    for _ in range(10):
        loss = nn.functional.mse_loss(by_hand(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    torch.manual_seed(1)
    losses = []
    for _ in range(10):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == expected
    assert losses[-1] < losses[0] / 2
    for ours, other in zip(engine.module.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, other)
