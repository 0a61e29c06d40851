"""Ranks that act as one: an error on one rank is raised on all, and no rank waits for another that has left. They agree
in two ways. Where a run is set up, saved or loaded they exchange objects. In a step they compare ``words``, which
travel in a collective. Where a rank may be the only one that comes, they meet in the job's store before they exchange
objects (``meeting.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lpq.distributed import meeting
from lpq.registry.errors import LpqError
from lpq.registry.errors import words as in_words
from lpq.registry.showing import listed
from lpq.torch_private.distributed import group_named

T = TypeVar("T")

BITS = 30
LIMIT = (1 << BITS) - 1
"""The largest of ``words``. With each goes its complement, so that a MAX shows whether all ranks have the same."""


class Ranks:
    """All processes of a group or of a mesh, or of the default group; this process alone where there is no group, or
    with ``alone``."""

    error: ClassVar[type[Exception]] = RuntimeError
    """The class of the errors that all ranks raise."""

    def __init__(
        self, group: ProcessGroup | DeviceMesh | None = None, *, alone: bool = False, device: torch.device | None = None
    ) -> None:
        """``device``: the device of the words that they compare; None: the CPU."""
        self.many = dist.is_initialized() and not alone
        self.group = group if isinstance(group, ProcessGroup) else None
        self.device = device
        self.names = [_here()]
        """Their ranks among all processes, which messages use."""
        self.groups: list[str] = []
        """The names of the groups that join them: the groups themselves would be kept alive."""
        if isinstance(group, DeviceMesh):
            self.names = group.mesh.flatten().tolist()
            self.groups = [one.group_name for one in group.get_all_groups() if one.size() > 1]
        elif self.many and (joined := group or dist.group.WORLD) is not None:
            self.names, self.groups = dist.get_process_group_ranks(joined), [joined.group_name]
        self.rank, self.size = self.names.index(_here()), len(self.names)

    @classmethod
    def of(cls, group: ProcessGroup | None, shared: bool, does: str, *, first: bool = False) -> Self:
        """The ranks of a group. Without a group: all ranks where they share the model, and otherwise this rank alone,
        as the others may never come. Where others may not come, this rank waits for them, and says for what.

        ``does``: the action in words. ``first``: rank 0 alone may do it on a model that is not shared, for if all ranks
        did, they would write one file, or compute different values from different data, without a word.
        """
        if group is not None and not (dist.is_initialized() and isinstance(group, ProcessGroup)):
            raise cls.error(
                "process_group is to be a group that this process is in: call it on the ranks of the group only, "
                "and for a mesh pass mesh.get_group()"
            )
        ranks = cls(group)
        if not ranks.many:
            return ranks
        if group is None and not shared:
            if first and ranks.rank:
                raise cls.error(
                    f"rank 0 alone {does} a model that is whole on each rank, of which no DTensor gives each a "
                    f"part, and this is rank {ranks.rank}: call it under `if rank == 0:`; or, where all ranks call "
                    "it, pass process_group=torch.distributed.group.WORLD"
                )
            return cls(alone=True)
        text = (
            f"rank {ranks.names[ranks.rank]} {does} a model that the ranks {listed([*map(str, ranks.names)])} share, "
            "or that process_group names, and another one of them does not: call it on all of them alike"
        )
        if ranks.size > 1 and not meeting.meet(ranks.names, "a call", does, None, text):
            raise cls.error(text)
        return ranks

    @classmethod
    def as_error(cls, raised: BaseException) -> Exception:
        """The error to raise on all ranks in place of ``raised``: it can travel, since it is made from a message
        alone."""
        if isinstance(raised, LpqError) and isinstance(raised, cls.error):
            return raised
        return cls.error(message(raised))

    # ------------------------------------------------------------------------------ objects

    def exchange(self, mine: T) -> dict[int, T]:
        """Return an object of each rank, by its name. Each group passes on the objects of the groups before it."""
        objects = {self.names[self.rank]: mine}
        for name in self.groups:
            group = group_named(name)
            answers: list[dict[int, T]] = [{} for _ in range(group.size())]
            dist.all_gather_object(answers, objects, group=group)
            objects = {rank: theirs for one in answers for rank, theirs in one.items()}
        return {name: objects[name] for name in self.names}

    def all(self, function: Callable[[], T]) -> list[T]:
        """Call ``function`` on every rank, and return the results of all. An error on any rank is raised on all."""
        result: T | None = None
        error = cause = None
        try:
            result = function()
        except Exception as raised:
            error, cause = self.as_error(raised), raised
        outcomes = self.exchange((result, error))
        if errors := {name: error for name, (_, error) in outcomes.items() if error is not None}:
            raise self.raised(errors) from cause
        return [result for result, _ in outcomes.values()]  # type: ignore[misc]

    def each(self, function: Callable[[], T]) -> T:
        """As ``all``, for results that stay on their ranks: return this rank's result."""
        own: list[T] = []
        self.all(lambda: own.append(function()))
        return own[0]

    def first(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 alone; all ranks get its result, or its error."""
        of_first: T = self.all(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[assignment]
        return of_first

    def raised(self, errors: Mapping[int, Exception]) -> Exception:
        """The error of the first rank that has one; its message names the rank unless all ranks have the same error."""
        name, error = min(errors.items())
        if len(errors) == self.size and len({str(e) for e in errors.values()}) == 1:
            return type(error)(str(error))
        return type(error)(f"rank {name}: {error}")

    def equal(self, facts: Sequence[str], differ: str, remedy: str, none: str = "none") -> None:
        """Raise on all ranks unless all have these facts, and name the first that differs. A hash travels before them.

        ``differ``: the beginning of the message, and ``remedy`` its end. ``none``: stands for a fact that a rank lacks.
        """
        if len({*self.exchange(words("\n".join(facts))).values()}) == 1:
            return
        raise self.error(f"{differ}: {difference(self.exchange([*facts]), none)}. {remedy}")


def difference(facts: Mapping[int, Sequence[str]], none: str = "none") -> str:
    """Say, of ranks that do not all have the same facts, the first that differs. ``none``: see ``Ranks.equal``."""
    first = min(facts)
    other = min(rank for rank in facts if facts[rank] != facts[first])
    mine, theirs = _lacking(facts[first], facts[other]), _lacking(facts[other], facts[first])
    if mine is theirs is None:
        mine, theirs = next((a, b) for a, b in zip_longest(facts[first], facts[other]) if a != b)
    return f"rank {first} has [{mine or none}], and rank {other} has [{theirs or none}]"


def _lacking(facts: Sequence[str], others: Iterable[str]) -> str | None:
    """The first fact that is not among others; None if all are."""
    there = {*others}
    return next((fact for fact in facts if fact not in there), None)


def message(raised: BaseException) -> str:
    """An error's text, with its type and place where it is none of lpq's own."""
    return str(raised) if isinstance(raised, LpqError) else in_words(raised)


def sharing(
    parameters: Iterable[Tensor], replicas: Iterable[ProcessGroup] = (), device: torch.device | None = None
) -> list[Ranks]:
    """Return the sets of ranks over which any of these parameters is divided, over all dimensions of their meshes, and
    the ranks of each group of ``replicas``. Each set comes once, in an order that is the same on all ranks."""
    meshes = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    sets: dict[tuple[int, ...], Ranks] = {}
    every: list[DeviceMesh | ProcessGroup] = [*meshes.values(), *replicas]
    for joined in every:
        ranks = Ranks(joined, device=device)
        if ranks.size > 1:
            sets.setdefault(tuple(ranks.names), ranks)
    return [*sets.values()]


def raise_on_all(
    error: Exception | None, sets: Iterable[Ranks], before: str, could_not: str, kind: type[Exception] = RuntimeError
) -> None:
    """Raise if a rank of these sets has an error: on that rank the error itself, elsewhere an error of this ``kind``
    with its words between ``before`` and ``could_not``. Each set passes on the errors of the sets before it."""
    first = None if error is None else (_here(), message(error))
    for ranks in sets:
        first = min((one for one in ranks.exchange(first).values() if one is not None), default=None)
    if error is not None:
        raise error
    if first is not None:
        raise kind(f"{before}rank {first[0]} could not{could_not}: {first[1]}")


def _here() -> int:
    """The rank of this process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


# ---------------------------------------------------------------------------------- words


def digest(text: str) -> int:
    """A number of 120 bits, equal for equal texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:15], "big")


def words(text: str) -> tuple[int, ...]:
    """The words of the hash of a text, each a number of 30 bits."""
    number = digest(text)
    return tuple(number >> (BITS * i) & LIMIT for i in range(4))
