"""Ranks that act as one: an error on one of them is raised on all, and none waits for another that has left.

All of it takes collectives of small objects. It is for setting up, saving and loading, and not for work of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from lpq.distributed import meeting
from lpq.operations.reduce_statistics import same_ranks
from lpq.registry.errors import LpqError, words
from lpq.registry.showing import listed
from lpq.torch_private.distributed import is_imitated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def exchange(mine: T, groups: Iterable[ProcessGroup]) -> dict[int, T]:
    """Exchange an object with all ranks that these groups join, and return theirs by rank among all processes. Each
    group in turn passes on the objects that the groups before it brought. Without groups, there is only this process's
    own."""
    import torch.distributed as dist

    known = {_here(): mine}
    for group in groups:
        found: list[dict[int, T]] = [{} for _ in range(group.size())]
        dist.all_gather_object(found, known, group=group)
        known = {rank: theirs for one in found for rank, theirs in one.items()}
    return known


@contextmanager
def together(parameters: Iterable[Tensor], what: str) -> Iterator[None]:
    """Raise on all ranks that share out any of these parameters, or hold a replica of them, if one rank raises inside.
    ``what``: the failed action in words, for ranks without an error of their own.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    found = exchange(words(error) if error is not None else None, groups_of(parameters))
    if error is not None:
        raise error
    if faults := {rank: fault for rank, fault in found.items() if fault is not None}:
        rank, fault = min(faults.items())
        raise RuntimeError(f"{what}, because rank {rank} could not: {fault}")


class Ranks:
    """All processes of a group, or of the default one; this one alone where there is none, or with ``alone``."""

    def __init__(self, group: ProcessGroup | None = None, *, alone: bool = False) -> None:
        import torch.distributed as dist

        self.many = dist.is_available() and dist.is_initialized() and not alone
        if group is not None and not (self.many and isinstance(group, dist.ProcessGroup)):
            raise self.as_error(
                LpqError(
                    "process_group is to be a group that this process is in: call it on the ranks of the group only, "
                    "and for a mesh pass mesh.get_group()"
                )
            )
        self.group = group
        self.rank = dist.get_rank(group) if self.many else 0
        """The place of this process among them."""
        self.names = dist.get_process_group_ranks(group or dist.group.WORLD) if self.many else [_here()]
        """Their ranks among all processes, which messages use."""
        self.size = len(self.names)

    @classmethod
    def of(cls, group: ProcessGroup | None, shared: bool, does: str, *, first: bool = False) -> Self:
        """The ranks of a group; without one all ranks, where they share the model, and this one alone where not: others
        may never come. Where they may not, this one waits for them, and says for what.

        ``does``: the action in words. ``first``: rank 0 alone may do it on a model that is not shared, for if all did,
        they would write one file, or derive different values of different data, without a word.
        """
        ranks = cls(group)
        if not ranks.many:
            return ranks
        if group is None and not shared:
            if first and ranks.rank:
                raise ranks.as_error(
                    LpqError(
                        f"rank 0 alone {does} a model that is whole on each rank, of which no DTensor gives each a "
                        f"part, and this is rank {ranks.rank}: call it under `if rank == 0:`; or, where all ranks call "
                        "it, pass process_group=torch.distributed.group.WORLD"
                    )
                )
            return cls(alone=True)
        ranks._wait(does)
        return ranks

    def _wait(self, does: str) -> None:
        """Wait until all of them do the same, and not in a collective, in which nobody would hear why."""
        names = listed([*map(str, self.names)])
        text = (
            f"rank {self.names[self.rank]} {does} a model that the ranks {names} share, or that process_group names, "
            "and another one of them does not: call it on all of them alike"
        )
        if self.size > 1 and not is_imitated() and not meeting.meet(self.names, does, does, None, text):
            raise self.as_error(LpqError(text))

    def as_error(self, raised: BaseException) -> Exception:
        """The error to raise on all ranks for this one: it can travel, since it is made from a message alone."""
        return RuntimeError(message(raised))

    def all(self, function: Callable[[], T]) -> list[T]:
        """Call ``function`` on every rank, and return the results of all. An error on any rank is raised on all."""
        result: T | None = None
        error = cause = None
        try:
            result = function()
        except Exception as raised:
            error, cause = self.as_error(raised), raised
        found = exchange((result, error), self._groups)
        if errors := {name: error for name, (_, error) in found.items() if error is not None}:
            raise self.raised(errors) from cause
        return [found[name][0] for name in self.names]  # type: ignore[misc]

    def each(self, function: Callable[[], T]) -> T:
        """As ``all``, for results that stay on their ranks: return this rank's own."""
        made: list[T] = []
        self.all(lambda: made.append(function()))
        return made[0]

    def alike(self, function: Callable[[], T], differ: str) -> T:
        """As ``all``, for results that must be equal: return one. ``differ``: the error on all ranks if they differ."""
        found = self.all(function)
        if any(other != found[0] for other in found):
            raise self.as_error(LpqError(differ))
        return found[self.rank]

    def first(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 alone; all ranks get its result, or its error."""
        found: T = self.all(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[assignment]
        return found

    def raised(self, errors: Mapping[int, Exception]) -> Exception:
        """The error of the first rank that has one; its message names the rank unless all ranks have the same error."""
        name, error = min(errors.items())
        if len(errors) == self.size and len({str(e) for e in errors.values()}) == 1:
            return type(error)(str(error))
        return type(error)(f"rank {name}: {error}")

    @property
    def _groups(self) -> list[ProcessGroup]:
        import torch.distributed as dist

        group = self.group or dist.group.WORLD
        return [group] if self.many and group is not None else []


def _here() -> int:
    """The rank of this process among all."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def message(raised: BaseException) -> str:
    """An error's text, with its type and place where it is none of lpq's own."""
    return str(raised) if isinstance(raised, LpqError) else words(raised)


def groups_of(parameters: Iterable[Tensor], others: Iterable[ProcessGroup] = ()) -> list[ProcessGroup]:
    """The groups of all dimensions of all meshes over which these parameters lie, in the order of the parameters, which
    is the same on all ranks, and those of the ``others`` that join more ranks."""
    found: dict[tuple[int, ...], ProcessGroup] = {}
    meshes = (parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor))
    for group in [*(group for mesh in meshes for group in mesh.get_all_groups()), *others]:
        if group.size() > 1:
            found.setdefault(same_ranks(group), group)
    return list(found.values())


def circles_of(parameters: Iterable[Tensor], others: Iterable[ProcessGroup] = ()) -> tuple[tuple[int, ...], ...]:
    """The ranks of all meshes over which these parameters lie, and of each other group: some for each set of ranks."""
    meshes = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    found = [*(tuple(mesh.mesh.flatten().tolist()) for mesh in meshes.values()), *map(same_ranks, others)]
    return tuple(ranks for ranks in dict.fromkeys(found) if len(ranks) > 1)
