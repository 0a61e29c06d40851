"""Collectives as functions: operators that return what arrived, so that a compiler finds them in a graph.

A group is given by its name, a string, which nothing keeps alive and any copy can have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def begin_all_gather(tensors: Sequence[Tensor], ranks: int, group: str) -> list[Tensor]:
    """Begin to gather these of all ranks at once, each along its first dimension. The results must go through
    ``arrived`` before they are used: a GPU does other work meanwhile."""
    return list(torch.ops._c10d_functional.all_gather_into_tensor_coalesced(list(tensors), ranks, group))


def arrived(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Wait for tensors whose collectives were begun, and return them. Layers with the same input have their waits
    merged by a compiler, and so all that follows from them; torch 2.15 never merges its own waits."""
    wait = torch.ops.lpq.arrived if torch.compiler.is_compiling() else torch.ops._c10d_functional.wait_tensor
    return [wait(tensor) for tensor in tensors]


def finish(begun: Tensor) -> Tensor:
    """Wait for one tensor, for which no other layer waits, and return it."""
    return torch.ops._c10d_functional.wait_tensor(begun)  # type: ignore[no-any-return]


def all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Reduce a tensor of all ranks, by ``sum`` or ``max``, into a new one."""
    return arrived([begin_all_reduce(tensor, operation, group)])[0]


def begin_all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    """As above, but the result must go through ``arrived``, or ``finish``."""
    return torch.ops._c10d_functional.all_reduce(tensor.contiguous(), operation, group)  # type: ignore[no-any-return]


def begin_reduce_scatter(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """The sum over ranks of this rank's part: there is one equal part for each rank along the first dimension. The
    result must go through ``finish``."""
    result: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(tensor.contiguous(), "sum", ranks, group)
    return result


def all_to_all(tensor: Tensor, from_ranks: Sequence[int], to_ranks: Sequence[int], group: str) -> Tensor:
    """Send rank 0 the first ``to_ranks[0]`` parts along the first dimension, and so on; ``from_ranks`` counts what
    comes."""
    result = torch.ops._c10d_functional.all_to_all_single(tensor.contiguous(), list(from_ranks), list(to_ranks), group)
    return finish(result)
