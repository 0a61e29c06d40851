"""Setting up or loading on several ranks: what one of them cannot do is an error on all, and none waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor

from lpq.operations.reduce_statistics import same_ranks
from lpq.registry.errors import words

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@contextmanager
def together(parameters: Iterable[Tensor], what: str) -> Iterator[None]:
    """If one rank raises inside, all ranks raise that share out any of these parameters, or hold a replica of them.

    It takes a collective of small objects, and is not for what happens at every step. ``what``: in words, for ranks
    that did nothing wrong.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    import torch.distributed as dist

    known: dict[int, str] = {}
    if error is not None and dist.is_initialized():
        known[dist.get_rank()] = words(error)
    for group in _groups(parameters):
        told: list[dict[int, str]] = [{} for _ in range(group.size())]
        dist.all_gather_object(told, known, group=group)
        known = {rank: said for one in told for rank, said in one.items()}
    if error is not None:
        raise error
    if known:
        rank, said = min(known.items())
        raise RuntimeError(f"{what}, because rank {rank} could not: {said}")


def _groups(parameters: Iterable[Tensor]) -> list[ProcessGroup]:
    """The groups of all dimensions of all meshes over which they lie: what one rank says in each, in turn, reaches all.

    They are in the order of the parameters, which is the same on all ranks.
    """
    found: dict[tuple[int, ...], ProcessGroup] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            for group in parameter.device_mesh.get_all_groups():
                if group.size() > 1:
                    found.setdefault(same_ranks(group), group)
    return list(found.values())
