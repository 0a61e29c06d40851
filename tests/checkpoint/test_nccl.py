"""On GPUs, where ranks have nothing but NCCL to talk over: saving while training goes on, offloading, and going on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trained
from ranks import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _there_and_back(rank: int, folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    trained.uninterrupted(folder, "gpu", device="cuda")
    trained.resumed(folder, "gpu", used=True, device="cuda")


def _offloaded(rank: int, folder: Path) -> None:
    """Offloaded parameters are on the CPU, and their mesh is not."""
    trained.uninterrupted(folder, "offloaded", device="cuda", offload=True)
    trained.resumed(folder, "offloaded", used=True, device="cuda", offload=True)


def test_nccl_alone(tmp_path: Path) -> None:
    spawn(_there_and_back, min(torch.cuda.device_count(), 2), tmp_path, backend="nccl")


def test_offloaded(tmp_path: Path) -> None:
    """FSDP2 itself wants gloo beside NCCL for that."""
    spawn(_offloaded, min(torch.cuda.device_count(), 2), tmp_path, backend="cpu:gloo,cuda:nccl")
