"""Several processes on this machine: gloo over a store in a file. What fails in one is told by the test."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

TIMEOUT = timedelta(seconds=120)


def _enter(
    rank: int, function: Callable[..., None], ranks: int, backend: str, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        function(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort the interpreter's own way out


def spawn(function: Callable[..., None], ranks: int, *args: Any, backend: str = "gloo") -> None:
    """Run ``function(rank, *args)`` in so many processes; the first that fails ends all, and its error is raised."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (function, ranks, backend, folder, args), ranks)  # type: ignore[no-untyped-call]


def fully_shard(module: Any, **options: Any) -> Any:
    """FSDP2's, over the CPUs of all ranks: without a mesh it takes GPUs where there are any."""
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    return fsdp.fully_shard(module, **options)
