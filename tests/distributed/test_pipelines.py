"""Pipelines: layers that remember count one step for each micro-batch, whatever the schedule, and none for shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleavedZeroBubble

import lpq

WIDTH, ROWS, BATCHES = 32, 16, 4


def part(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def pipeline(rank: int, zero_bubble: bool, frozen: bool) -> None:
    """``frozen`` layers are given the shapes; for others torch finds them by passes over memory that no data fills."""
    ranks, own = dist.get_world_size(), 2 if zero_bubble else 1
    numbers = [rank + i * ranks for i in range(own)]
    parts = [lpq.convert(part(number), "fp8-delayed") for number in numbers]
    shape = {name: (torch.zeros(ROWS, WIDTH, requires_grad=True),) for name in ("input_args", "output_args")}
    device, how = torch.device("cpu"), shape if frozen else {}
    stages = [
        PipelineStage(module, number, own * ranks, device, **how) for module, number in zip(parts, numbers, strict=True)
    ]
    for module in parts:
        module[2].requires_grad_(not frozen)  # type: ignore[index]
    with pytest.MonkeyPatch.context() as patch:  # such memory holds anything
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *a, **k: filled(empty(*a, **k)))
        scheduled: Any = ScheduleInterleavedZeroBubble if zero_bubble else ScheduleGPipe
        schedule = scheduled(stages if zero_bubble else stages[0], BATCHES, loss_fn=loss, scale_grads=False)
        torch.manual_seed(7)
        x, target = torch.randn(2, BATCHES * ROWS, WIDTH)
        given = (x,) if 0 in numbers else ()
        schedule.step(*given, **({"target": target} if own * ranks - 1 in numbers else {}))
    for module in parts:
        for name, history in module.named_buffers():
            if name.endswith("history"):
                assert int((history != 0).sum()) == BATCHES, name
                assert history.max() < 100, name


def filled(memory: Tensor) -> Tensor:
    return memory.fill_(5e19) if memory.dtype == torch.float32 and memory.shape[-1:] == (WIDTH,) else memory


OLD = "zero-bubble schedules of torch 2.11 fail with any autograd function that is written in Python"
AS_OLD = pytest.mark.skipif(torch.__version__ < "2.12", reason=OLD)


@pytest.mark.parametrize(
    ("zero_bubble", "frozen"), [(False, False), (False, True), pytest.param(True, False, marks=AS_OLD)]
)
@on_ranks(2)
def test_each_micro_batch_is_one_step(rank: int, zero_bubble: bool, frozen: bool) -> None:
    pipeline(rank, zero_bubble, frozen)
