"""Layers and experts that two GPUs share out, over NCCL: operands, results and training are those of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ranks import spawn
from test_expert_parallel import MX, ROWS, as_one
from test_overlap import compiled as overlapped_and_compiled
from test_overlap import equals
from test_parallel_combined import compiled, gathered_with_fsdp, with_fsdp
from test_parallel_operands import MODES, same_operands
from torch.distributed.tensor import Shard

from lpq.distributed import tensor_parallel as tp

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
BACKEND = "cpu:gloo,cuda:nccl"
TEXTS = ["fp8", "fp8(scaling=delayed)", "fp8(scaling=block)", "mxfp8", "nvfp4", "nvfp4(rht=true, stochastic=true)"]
TEXTS += ["mxfp4(scale=ceil, rht=true, stochastic=true)"]


@pytest.mark.parametrize("text", TEXTS)
def test_operands_are_those_of_one_process(text: str) -> None:
    spawn(same_operands, 2, text, MODES, backend=BACKEND)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_training_with_fsdp2(shape: tuple[int, int]) -> None:
    spawn(with_fsdp, 2, "mxfp8", shape, "cuda", backend=BACKEND)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_training_by_weights_that_are_gathered_quantized(shape: tuple[int, int], recipe: str) -> None:
    spawn(gathered_with_fsdp, 2, recipe, shape, "cuda", backend=BACKEND)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_training_with_fsdp2_over_both_axes() -> None:
    spawn(gathered_with_fsdp, 4, "fp8-current", (2, 2), "cuda", backend=BACKEND)


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_recorded_as_cuda_graphs(recipe: str) -> None:
    for style in (tp.ColwiseParallel(input_layouts=Shard(1)), tp.RowwiseParallel(output_layouts=Shard(1))):
        recorded = partial(compiled, mode="reduce-overhead", dynamic=False)
        spawn(recorded, 2, style, recipe, 4, "cuda", backend=BACKEND)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_input_that_is_multiplied_as_it_arrives(recipe: str, bias: bool) -> None:
    spawn(equals, 2, recipe, bias, 1, 1, "cuda", backend=BACKEND)


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_one_that_is_compiled(recipe: str, mode: str | None) -> None:
    spawn(partial(overlapped_and_compiled, mode=mode, dynamic=False), 2, recipe, "cuda", 4, backend=BACKEND)


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", None])
def test_experts(recipe: str | None) -> None:
    spawn(as_one, 2, 2, recipe, "cuda", backend=BACKEND)


@pytest.mark.parametrize("recipe", [MX, ROWS])
def test_experts_whose_rows_travel_encoded(recipe: str) -> None:
    spawn(as_one, 2, 2, recipe, "cuda", False, "encoded", backend=BACKEND)
