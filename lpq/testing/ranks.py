"""Ranks that are threads of this process: code of several ranks runs unchanged, by torch's own collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lpq.torch_private.distributed import forget_group, name_group, work_of

T = TypeVar("T")
PATIENCE = 60
"""Seconds that a rank waits for the others in a collective, at most."""
_numbers = itertools.count()


class Exchange:
    """Where the ranks of a group hand each other tensors."""

    def __init__(self, ranks: int) -> None:
        self.name = f"lpq ranks {next(_numbers)}"
        self.barrier = Barrier(ranks, timeout=PATIENCE)
        self._tensors: list[list[Tensor]] = [[] for _ in range(ranks)]

    def swap(self, rank: int, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of all ranks."""
        self._tensors[rank] = [tensor.clone() for tensor in tensors]
        self.barrier.wait()
        of_all = [*self._tensors]
        self.barrier.wait()  # before any rank sends anew
        return of_all


class Rank(ProcessGroup):
    """One rank's group, for those collectives that tensor parallelism and reductions of statistics need."""

    def __init__(self, rank: int, ranks: int, exchange: Exchange) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        self._exchange = exchange

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """A name of this rank alone: all ranks are in one process."""
        return f"{self._exchange.name}, {self.rank()}"

    def getBackendName(self) -> str:
        return "lpq"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        by_tensor = zip(*self._exchange.swap(self.rank(), tensors), strict=True)
        for tensor, of_all in zip(tensors, by_tensor, strict=True):
            together = torch.stack(of_all)
            tensor.copy_(together.amax(0) if opts.reduceOp == ReduceOp.MAX else together.sum(0))
        return _work(tensors)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        by_tensor = zip(*self._exchange.swap(self.rank(), inputs), strict=True)
        for output, of_all in zip(outputs, by_tensor, strict=True):
            output.copy_(torch.cat(of_all).view(output.shape))
        return _work(outputs)


def on_ranks(runs: Sequence[Callable[[Rank], T]]) -> list[T]:
    """Run a function on each rank, all at once, each with the rank's group; return what they return."""
    exchange = Exchange(len(runs))
    groups = [Rank(rank, len(runs), exchange) for rank in range(len(runs))]

    def on_rank(run: Callable[[Rank], T], group: Rank) -> T:
        try:
            return run(group)
        except BaseException:
            exchange.barrier.abort()  # or the others wait
            raise

    for group in groups:
        name_group(group.group_name, group)
    try:
        with ThreadPoolExecutor(len(runs)) as pool:
            futures = [pool.submit(on_rank, run, group) for run, group in zip(runs, groups, strict=True)]
    finally:
        for group in groups:
            forget_group(group.group_name)
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def _work(tensors: list[Tensor]) -> Any:
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return work_of(future)
