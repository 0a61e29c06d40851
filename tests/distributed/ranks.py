"""Several processes on this machine: gloo over a store in a file. What fails in one is told by the test."""

from __future__ import annotations

import atexit
import importlib
import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pool import PATIENCE, Pool, context
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lpq.registry.errors import LpqError

T = TypeVar("T")
SOON = 30
"""Seconds in which all ranks raise an error that they agree on: a fraction of the timeout of the process group."""


class _Kept:
    """A pool for each number of ranks that was asked for. A rank has some 50 MB that no other process has."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def of(self, ranks: int) -> Pool:
        pool = self.pools.get(ranks)
        if pool is not None and not pool.serves():
            pool.close()
            pool = None
        if pool is None:
            pool = self.pools[ranks] = Pool(ranks)
        return pool

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()


_kept = _Kept()
atexit.register(_kept.close)  # before multiprocessing waits for the processes to end


def spawn(
    function: Callable[..., None],
    ranks: int,
    *args: Any,
    backend: str = "gloo",
    fresh: bool = False,
    patience: float = PATIENCE,
) -> None:
    """Run ``function(rank, *args)`` in so many processes; where one fails all are ended, and its error is raised.

    The processes may have run other functions before, and will run others. ``fresh`` ones do not: they are for what
    patches a module for good, or looks at what is done once in a process; and for GPUs, whose memory a process keeps.
    """
    if fresh or backend != "gloo":
        pool = Pool(ranks, backend)
        try:
            pool.run(function, *args, patience=patience)
        finally:
            pool.close()
    else:
        _kept.of(ranks).run(function, *args, patience=patience)


def on_ranks(ranks: int | None = None, **how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a check: ``check(rank, …)`` runs in so many processes, and the test has its other arguments.

    Args:
        ranks: None, where the check has a parameter of this name
        how: options of ``spawn``
    """

    def made(check: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            count = given["ranks"] if ranks is None else ranks
            spawn(partial(_check, check.__module__, check.__name__, given), count, **how)

        signature = inspect.signature(check)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.check = test.place_as = check  # type: ignore[attr-defined]
        return test

    return made


def _check(module: str, name: str, given: dict[str, Any], rank: int) -> None:
    """The check of this name, which a test stands in the place of."""
    getattr(importlib.import_module(module), name).check(rank, **given)


def on_one(function: Callable[..., T], *args: Any) -> T:
    """Call ``function(*args)`` on rank 0 and hand what it returns to all ranks, which would compute the same."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        with torch.random.fork_rng(devices=[]):  # that of the others stays where it is
            found = [function(*args)]
    dist.broadcast_object_list(found)
    made: T = found[0]
    return made


def of_all(value: T, group: Any = None) -> list[T]:
    """Return the value of each rank of a group."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def agreed(
    work: Callable[[], Any], errors: Any = (ValueError, RuntimeError, TypeError), group: Any = None
) -> list[str]:
    """The errors of all ranks of a group, every one of which raises, soon."""
    start = time.monotonic()
    with pytest.raises(errors) as raised:
        work()
    assert time.monotonic() - start < SOON
    return of_all(f"{type(raised.value).__name__}: {raised.value}", group)


def each_says(work: Callable[[], Any], words: str, group: Any = None) -> list[str]:
    """The errors of lpq of all ranks of a group, in each of which are these words."""
    said = agreed(work, LpqError, group)
    assert all(re.search(words, one) for one in said), said
    return said


def all_say(work: Callable[[], Any], words: str, group: Any = None) -> str:
    """The one error of lpq that all ranks of a group raise, in which are these words."""
    said = each_says(work, words, group)
    assert len({*said}) == 1, said
    return said[0]


def processes(function: Callable[..., None], ranks: int, *args: Any, join: bool = True) -> Any:
    """``function(rank, *args)`` in so many processes without a group, which end as they like."""
    return mp.start_processes(function, args, ranks, join, start_method=context().get_start_method())  # type: ignore[no-untyped-call]


@contextmanager
def imitated_ranks(ranks: int = 2) -> Iterator[None]:
    """Make this process the first of ranks that are not there, by torch's backend for trials: what the others send is
    what this one sends. Its store keeps nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(*names: str, device: str = "cpu") -> DeviceMesh:
    """A mesh of all ranks, in two rows where it has two dimensions."""
    ranks = dist.get_world_size()
    return init_device_mesh(device, (2, ranks // 2) if len(names) == 2 else (ranks,), mesh_dim_names=names or None)


def fully_shard(module: Any, **options: Any) -> Any:
    """FSDP2's, over the CPUs of all ranks: without a mesh it takes GPUs where there are any."""
    options.setdefault("mesh", mesh_of())
    return fsdp.fully_shard(module, **options)
