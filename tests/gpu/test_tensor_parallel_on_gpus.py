"""Tensor parallelism over NCCL: on each of two GPUs the operands are parts of those of one process, made by kernels."""

from __future__ import annotations

import pytest
import torch
from ranks import spawn
from test_parallel_operands import MODES, same_operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TEXTS = ["fp8", "fp8(scaling=delayed)", "fp8(scaling=block)", "mxfp8", "nvfp4", "nvfp4(rht=true, stochastic=true)"]


@pytest.mark.parametrize("text", TEXTS)
def test_operands_are_those_of_one_process(text: str) -> None:
    spawn(same_operands, 2, text, MODES, backend="cpu:gloo,cuda:nccl")
