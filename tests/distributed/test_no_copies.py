"""Shards in fp32 that are computed with in bf16 reach the kernels as they are: these round what they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from imitated_gpu import imitated_gpu
from ranks import fully_shard
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lpq
from lpq.kernels import Choice
from lpq.operations import bound, measuring
from lpq.operations.binding import Encode, Encoded, Encoding

SHAPE = (64, 64)
"""The shape of the weight."""


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
    measured, serving = measuring._measured, bound.serving

    def measure(x: Tensor, *rest: object) -> list[Tensor]:
        if x.shape == SHAPE:
            seen.append((x.dtype, rest[-1]))
        return measured(x, *rest)  # type: ignore[arg-type]

    def bind(choice: Choice, e: Encoding) -> Encode:
        assert choice.bind is not None
        encode: Any = choice.bind(e)

        def run(x: Tensor, *rest: Any) -> Encoded:
            if x.shape == SHAPE:
                seen.append((x.dtype, e.dtype))
            made: Encoded = encode(x, *rest)
            return made

        return run

    def watched(*task: Any) -> Choice | None:
        choice = serving(*task)
        return None if choice is None else replace(choice, bind=partial(bind, choice))

    monkeypatch.setattr(measuring, "_measured", measure)
    monkeypatch.setattr(bound, "serving", watched)
    with imitated_gpu():
        model = lpq.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), text, weights="high_precision")
        fully_shard(model, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for _ in range(3):
            x = torch.zeros(32, 64, dtype=torch.bfloat16, requires_grad=True)
            model(x).backward(torch.zeros(32, 64, dtype=torch.bfloat16))
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(seen))
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert counts[1] - counts[0] == counts[2] - counts[1] >= 2  # before forward and before backward
