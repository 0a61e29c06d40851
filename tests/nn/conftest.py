"""Notes of what runs fused, a GPU that is imitated, and a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from imitated_gpu import Gpu, imitated_gpu
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lpq.nn import fused_mlp, norms


@pytest.fixture
def fused_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one number with each pass of a fused block that is one function."""
    calls: list[int] = []
    own = fused_mlp.FusedMLP.forward

    def forward(ctx: Any, *args: Any) -> Tensor:
        calls.append(1)
        return own(ctx, *args)

    monkeypatch.setattr(fused_mlp.FusedMLP, "forward", staticmethod(forward))
    return calls


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with each norm that returns a sum, by whether it has made the sum itself."""
    calls: list[bool] = []
    own = norms.EncodedNorm.forward

    def forward(ctx: Any, *args: Any) -> Any:
        if args[-1]:
            calls.append(args[-2] is not None)
        return own(ctx, *args)

    monkeypatch.setattr(norms.EncodedNorm, "forward", staticmethod(forward))
    return calls


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with imitated_gpu() as gpu:
        yield gpu


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
