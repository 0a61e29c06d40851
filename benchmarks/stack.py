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
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.contenders import compile_afresh, training_step
from benchmarks.llama import Llama, rotations
from benchmarks.rows import Row, Task, one_by_one
from benchmarks.shapes import Stack
from benchmarks.timing import one_after_another
from lpq.bench.contenders import Contender, in_words
from lpq.bench.timing import Timing
from lpq.observe.collectives import collectives, gathered_bytes

STEPS = 24
PATIENCE = timedelta(minutes=2)
"""How long ranks on GPUs wait for one that does not come, before the run ends."""
T = TypeVar("T")


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
    how: dict[str, Any] = {"backend": "gloo"}
    if bound is not None:
        how = {"backend": "nccl", "device_id": bound, "timeout": PATIENCE}
    dist.init_process_group(store=store, rank=rank, world_size=ranks, **how)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


class Failed(Exception):
    """A rank failed, and with it all; in words."""


def meeting(device: torch.device) -> dist.ProcessGroup:
    """All ranks once more, in a group that needs no memory of a GPU and meets no collective of a step."""
    how: dict[str, Any] = {"timeout": PATIENCE} if device.type == "cuda" else {}
    found: dist.ProcessGroup = dist.new_group(backend="gloo", **how)
    return found


def measure(
    everyone: list[Contender], shape: Stack, steps: int, device: torch.device, before: Row | None = None
) -> Iterator[Row]:
    """Tokens a second and rank of each contender, the most memory that a rank had allocated, and the bytes that it
    gathers in a step; before and after each, so far."""
    peers = meeting(device)
    tasks = [Task(one.record(), partial(_of, one, shape, steps, device, peers)) for one in everyone]
    yield from one_by_one(tasks, {**asdict(shape), "ranks": dist.get_world_size()}, before)


def _of(contender: Contender, shape: Stack, steps: int, device: torch.device, peers: dist.ProcessGroup) -> Row:
    result: Row = begun(device)
    try:
        with together(peers):
            step = _step(contender, shape, device)
        timing, loss, peak = timed(step, steps, device, peers)
        with together(peers):
            gathered = gathered_in(step, contender)
        speed = shape.tokens / timing.median
        result |= {**timing.record("ms"), "tokens_per_second": speed, "loss": loss, "peak_bytes": peak, "failure": None}
        result["gathered_bytes"] = gathered
    except Failed as error:  # what one library cannot do is a result, and the others go on
        result |= {"peak_bytes": None, "failure": str(error)}
    if dist.get_rank() == 0:
        said = result["failure"] or f"{result['tokens_per_second']:,.0f} tokens/s"
        print(f"{contender.name}: {said}", file=sys.stderr)
    return result


def begun(device: torch.device) -> Row:
    """Begin a row without compiled code and models of earlier rows. Memory still allocated stands in the row."""
    compile_afresh()
    gc.collect()
    if device.type != "cuda":
        return {}
    torch.cuda.empty_cache()
    return {"left_bytes": torch.cuda.memory_allocated()}


def told(peers: dist.ProcessGroup | None, mine: T) -> list[T]:
    """The values that each rank tells."""
    if peers is None:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(peers)
    dist.all_gather_object(found, mine, group=peers)
    return found


def timed(
    step: Callable[[], Tensor], steps: int, device: torch.device, peers: dist.ProcessGroup | None
) -> tuple[Timing, float, int | None]:
    """The times of the slowest rank, this rank's last loss, and the most memory that a rank had allocated in a step. To
    build the model may have taken more."""
    with together(peers):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timing, loss = one_after_another(step, steps, device)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    every = told(peers, (timing, peak))
    slowest = max((times for times, _ in every), key=lambda times: times.median)
    return slowest, loss, max((most for _, most in every if most is not None), default=None)


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
def together(peers: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise an error of one rank in all of them, with the words of the first that failed; without peers, of this one.

    The ranks meet at the end. One that another's error left inside a step's collective, as where one GPU alone runs out
    of memory, cannot come: both wait until a group times out, which ends the run.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = in_words(error)
    every = told(peers, failure)
    for rank, words in enumerate(every):
        if words is not None:
            raise Failed(words if len(every) == 1 else f"rank {rank}: {words}")


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
