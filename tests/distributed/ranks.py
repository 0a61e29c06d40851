"""Several processes on this machine: gloo over a store in a file. What fails in one is told by the test.

To import torch takes a process some seconds. So these are forked from one that imported it and does nothing else;
but where there are GPUs, as a process that was forked may have none.
"""

from __future__ import annotations

import gc
import multiprocessing
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
IMPORTED = [
    "pytest",
    "hypothesis",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._inductor.compile_fx",
    "lpq.checkpoint",
    "lpq.optim",
]
"""What most tests need. None of it starts a thread, looks for a GPU or asks which plugins there are."""


def _enter(
    rank: int,
    function: Callable[..., None],
    ranks: int,
    backend: str,
    folder: str,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    gc.freeze()  # what was imported is left alone: to look through it takes up to a tenth of a rank's time
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


def processes(function: Callable[..., None], ranks: int, *args: Any, join: bool = True) -> Any:
    """``function(rank, *args)`` in so many processes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload(IMPORTED)
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    return mp.start_processes(function, args, ranks, join, start_method=method)  # type: ignore[no-untyped-call]


def spawn(function: Callable[..., None], ranks: int, *args: Any, backend: str = "gloo") -> None:
    """Run ``function(rank, *args)`` in so many processes; the first that fails ends all, and its error is raised."""
    with tempfile.TemporaryDirectory() as folder:
        processes(_enter, ranks, function, ranks, backend, folder, dict(os.environ), args)


def fully_shard(module: Any, **options: Any) -> Any:
    """FSDP2's, over the CPUs of all ranks: without a mesh it takes GPUs where there are any."""
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    return fsdp.fully_shard(module, **options)
