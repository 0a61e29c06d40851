"""Tokens a second of training a stack of Llama's blocks under FSDP2: fp32 shards, bf16 compute, fused AdamW.

Run alone it shards over one rank, which is the same code without traffic; under torchrun over as many as there are.
Each contender has a fresh model, one after the other, since a GPU does not hold them all.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.contenders import compile_afresh, training_step
from benchmarks.llama import Llama, rotations
from benchmarks.shapes import Stack
from benchmarks.timing import one_after_another
from lpq.bench.contenders import Contender, in_words
from lpq.observe.collectives import collectives, gathered_bytes

STEPS = 24


@contextmanager
def group() -> Iterator[int]:
    """The processes that torchrun started, or this one alone; yields how many."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = dist.HashStore() if ranks == 1 else None  # type: ignore[attr-defined]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    bound = device if device.type == "cuda" else None
    dist.init_process_group("nccl" if bound else "gloo", store=store, rank=rank, world_size=ranks, device_id=bound)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


class Failed(Exception):
    """A rank failed, and with it all; in words."""


def measure(everyone: list[Contender], shape: Stack, steps: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Tokens a second and rank of each contender, the most memory that a rank had allocated, and the bytes that it
    gathers in a step; after each, so far."""
    peers = dist.new_group(backend="gloo")  # needs no memory of a GPU, and meets no collective of a step
    results: list[dict[str, Any]] = []
    for contender in everyone:
        results.append(_of(contender, shape, steps, device, peers))
        yield {**asdict(shape), "ranks": dist.get_world_size(), "results": [*results]}


def _of(
    contender: Contender, shape: Stack, steps: int, device: torch.device, peers: dist.ProcessGroup
) -> dict[str, Any]:
    compile_afresh()
    gc.collect()
    result: dict[str, Any]
    try:
        with together(peers):
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step = _step(contender, shape, device)
        with together(peers):
            timing, loss = one_after_another(step, steps, device)
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        with together(peers):
            gathered = gathered_in(step, contender)
        speed = shape.tokens / timing.median
        result = {**timing.record("ms"), "tokens_per_second": speed, "loss": loss, "peak_bytes": peak, "failure": None}
        result["gathered_bytes"] = gathered
    except Failed as error:  # what one library cannot do is a result, and the others go on
        result = {"peak_bytes": None, "failure": str(error)}
    if dist.get_rank() == 0:
        said = result["failure"] or f"{result['tokens_per_second']:,.0f} tokens/s"
        print(f"{contender.name}: {said}", file=sys.stderr)
    return {**contender.record(), **result}


def gathered_in(step: Callable[[], object], contender: Contender) -> int | None:
    """Run a step and count the bytes that its all-gathers bring together.

    None where there is one rank, and of a compiled step, which gathers where nobody sees it.
    """
    if contender.compiled or dist.get_world_size() == 1:
        return None
    with collectives() as seen:
        step()
    return gathered_bytes(seen)


@contextmanager
def together(peers: dist.ProcessGroup) -> Iterator[None]:
    """Raise an error of one rank in all of them, with the words of the first that failed.

    The ranks meet at the end. One that another's error left inside a step's collective, as where one GPU alone runs out
    of memory, cannot come: both wait until a group times out, which ends the run.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = in_words(error)
    told: list[str | None] = [None] * dist.get_world_size(peers)
    dist.all_gather_object(told, failure, group=peers)
    for rank, words in enumerate(told):
        if words is not None:
            raise Failed(words if len(told) == 1 else f"rank {rank}: {words}")


def _step(contender: Contender, shape: Stack, device: torch.device) -> Callable[[], Tensor]:
    """A step of training, which returns its loss."""
    model = sharded(contender, shape, device)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(shape.batch, shape.sequence, shape.hidden, device=device, dtype=torch.bfloat16)
    target = torch.randn_like(x)
    cos, sin = rotations(shape, device, torch.bfloat16)

    return training_step(contender, model, lambda: nn.functional.mse_loss(model(x, cos, sin), target))


def sharded(contender: Contender, shape: Stack, device: torch.device) -> nn.Module:
    """The model of a contender: converted, each block compiled if so wished, and sharded."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # all ranks take part: before what may fail in one
    torch.manual_seed(0)
    with device:
        model = Llama(shape)
    converted = contender.convert(model)  # or what runs it
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if contender.compiled:
            block.compile(fullgraph=True, dynamic=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return converted
