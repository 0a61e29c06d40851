"""The processes that torchrun starts: the only place where the process group is created and destroyed. When ranks fail,
the first one reports why. The others, which fail because of it, stay silent. Importing this imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from lpq.train.errors import TrainError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets in the environment of each process."""
PATIENCE = timedelta(seconds=10)
"""How long a rank that fails waits for the report of the first one. When one ends, torchrun ends them all."""
ErrorReport = Callable[..., int]
"""``report(error, aloud=…, rank=…)`` returns the exit status for an error, and prints it first if ``aloud``."""
SOON = 2.0
"""Seconds that rank 0 stays after the report for others that fail as it did: its process may hold the store."""


def launched() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    absent = [name for name in VARIABLES if name not in os.environ]
    world = os.environ.get("WORLD_SIZE", "1")
    if absent and world != "1":
        raise TrainError(
            f"this is one of {world} processes (WORLD_SIZE={world}), and {', '.join(absent)} is not set: start them "
            f"with torchrun --nproc-per-node {world} -m lpq …, or unset WORLD_SIZE to train in one process"
        )
    return not absent


def prints() -> bool:
    """Whether this process prints for all processes: it is the first, or the only one."""
    return any(name not in os.environ for name in VARIABLES) or os.environ["RANK"] == "0"


def work(job: Callable[[Store], object], report: ErrorReport, *, group: bool = True) -> NoReturn:
    """Do ``job(store)`` together with the other processes of torchrun, then end this process. ``group``: as one process
    group; else each works for itself, and the store is all that they share.

    It ends here and not by returning: threads of the process groups now and then abort the interpreter's own way out.
    """
    status = 1
    try:
        status = _status(job, report, group)
    finally:
        with suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _status(job: Callable[[Store], object], report: ErrorReport, group: bool) -> int:
    """Do the job as one of the ranks; return its exit status."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    rank, store = int(os.environ["RANK"]), None
    if rank:
        warnings.simplefilter("ignore")  # the first rank has the same
    try:
        store, rank, size = next(rendezvous("env://"))
        cuda = torch.cuda.is_available()
        if cuda and int(os.environ["LOCAL_RANK"]) < torch.cuda.device_count():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if group:  # neither backend connects before it is used, and --device may choose either
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=PrefixStore("lpq", store), rank=rank, world_size=size)
        job(store)
        if group:
            dist.destroy_process_group()
    except BaseException as error:
        # The group is left as it is: to part from ranks that wait in a collective, one would have to wait, too. This
        # process ends, and with it all that it has of the group.
        first = store is None or _is_first(store)
        status = report(error, aloud=first, rank=rank)
        sys.stderr.flush()
        if store is not None:
            _let_report(store, first)
            if rank == 0:
                _await_the_others(store, int(os.environ["WORLD_SIZE"]))
        return status
    return 0


def _is_first(store: Store) -> bool:
    """Whether no rank failed before this rank."""
    try:
        return store.add("lpq/failed", 1) == 1
    except RuntimeError:  # the store is gone with the process that had it
        return True


def _let_report(store: Store, reported: bool) -> None:
    """Signal to all ranks that the error was reported, or wait for that signal."""
    with suppress(RuntimeError):
        if reported:
            store.set("lpq/reported", "")
        else:
            store.wait(["lpq/reported"], PATIENCE)


def _await_the_others(store: Store, ranks: int) -> None:
    """Give the other ranks time to read that the error was reported: the store may end with this process."""
    deadline = time.monotonic() + SOON
    with suppress(RuntimeError):
        while store.add("lpq/failed", 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
