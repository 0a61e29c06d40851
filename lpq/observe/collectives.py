"""The collectives that a piece of code runs, with the bytes of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lpq.tensor import QuantizedTensor


@dataclass(frozen=True)
class Collective:
    """One collective as this rank sees it."""

    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce`` or the operator's own name."""
    bytes: int
    """What the result of all ranks takes: the whole of a gather, the input of a reduce-scatter."""


KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
}
SILENT = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators beside the collectives that send nothing."""


WITH_PARTS = (DTensor, QuantizedTensor)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: list[Collective]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile while it looks on: a function that torch passes over once it never compiles."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, WITH_PARTS) for t in types):
            return NotImplemented  # they run operators on their parts first, and those are seen here
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            sizes = [sum(t.nbytes for t in tree_iter(a) if isinstance(t, Tensor)) for a in args]
            ranks = args[1] if name.startswith("all_gather_into_tensor") else 1  # it takes one rank's part
            if name not in SILENT:
                self.seen.append(Collective(KINDS.get(name, name), ranks * max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


@contextmanager
def collectives() -> Iterator[list[Collective]]:
    """Fill a list with the collectives that run inside, on this rank, forward and backward."""
    seen: list[Collective] = []
    with _Watch(seen):
        yield seen


def gathered_bytes(seen: list[Collective]) -> int:
    """The bytes that all-gathers brought together."""
    return sum(c.bytes for c in seen if c.kind == "all_gather")
