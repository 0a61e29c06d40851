"""The collectives that a piece of code runs, with the bytes of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lpq.tensor import QuantizedTensor
from lpq.torch_private.dispatch import TorchDispatchMode, schema_of
from lpq.torch_private.distributed import COLLECTIVES, KINDS, SILENT
from lpq.torch_private.pytree import tree_iter


@dataclass(frozen=True)
class Collective:
    """One collective on this rank."""

    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce`` or the operator's own name."""
    bytes: int
    """The bytes of the whole, of all ranks: the result of a gather, the input of a reduce-scatter."""


WITH_PARTS = (DTensor, QuantizedTensor)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: list[Collective]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile under this mode: a function that torch leaves uncompiled once is never compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, WITH_PARTS) for t in types):
            return NotImplemented  # they run operators on their parts first, and those come here
        if func.namespace in COLLECTIVES:
            name = schema_of(func).name.partition("::")[2]
            sizes = [sum(t.nbytes for t in tree_iter(a) if isinstance(t, Tensor)) for a in args]
            ranks = args[1] if name.startswith("all_gather_into_tensor") else 1  # it takes one rank's part
            if name not in SILENT:
                self.calls.append(Collective(KINDS.get(name, name), ranks * max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


@contextmanager
def collectives() -> Iterator[list[Collective]]:
    """Fill a list with the collectives that run inside, on this rank, forward and backward."""
    calls: list[Collective] = []
    with _Watch(calls):
        yield calls


def gathered_bytes(seen: list[Collective]) -> int:
    """Count the bytes that all-gathers brought together.

    Args:
        seen: The list of ``collectives``.
    """
    return sum(c.bytes for c in seen if c.kind == "all_gather")
