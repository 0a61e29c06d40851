"""Shards in fp32 that are computed with in bf16 reach the kernels as they are: these round what they read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import fully_shard
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lpq
from lpq.operations import measuring, quantizing


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("text", ["fp8-current", "mxfp8", "fp8-delayed"])
@pytest.mark.usefixtures("one_rank")
def test_no_weight_is_copied_to_be_rounded(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Not after an optimizer's step, nor before a gather of forward or of backward."""
    seen: list[tuple[torch.dtype, object]] = []  # of weights: in what they are held, and as what they are read
    measured, encoded = measuring._measured, quantizing._encoded

    def measure(x: Tensor, *rest: object) -> list[Tensor]:
        if x.shape == (64, 64):
            seen.append((x.dtype, rest[-1]))
        return measured(x, *rest)  # type: ignore[arg-type]

    def encode(x: Tensor, *rest: object) -> list[Tensor]:
        if x.shape == (64, 64):
            seen.append((x.dtype, rest[6]))  # behind statistics, sides, seed, offset and measure
        return encoded(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "_measured", measure)
    monkeypatch.setattr(quantizing, "_encoded", encode)
    model = lpq.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), text, weights="high_precision")
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for _ in range(3):
        model(torch.randn(32, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(seen))
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert counts[1] - counts[0] == counts[2] - counts[1] >= 2  # before forward and before backward
