"""The ranks that save or load together: what one of them cannot do is the same error on all, and none waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lpq.checkpoint.errors import CheckpointError
from lpq.registry.errors import LpqError, words

T = TypeVar("T")


class Ranks:
    """All processes of a group, or of the default one; this one alone where there is none."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.many = dist.is_available() and dist.is_initialized()
        if group is not None and not (self.many and isinstance(group, dist.ProcessGroup)):
            raise CheckpointError(
                "process_group is to be a group that this process is in: call it on the ranks of the group only, and "
                "for a mesh pass mesh.get_group()"
            )
        self.group = group
        self.rank = dist.get_rank(group) if self.many else 0
        """Which of them this process is."""
        self.names = dist.get_process_group_ranks(group or dist.group.WORLD) if self.many else [0]
        """Their ranks among all processes, by which the user knows them."""
        self.size = len(self.names)

    def all(self, function: Callable[[], T]) -> list[T]:
        """Call ``function`` on every rank; what it returned on each. An error on any rank is raised on all."""
        result: T | None = None
        error = cause = None
        try:
            result = function()
        except Exception as raised:
            error, cause = as_checkpoint_error(raised), raised
        found: list[Any] = [(result, error)]
        if self.many:
            found = [None] * self.size
            dist.all_gather_object(found, (result, error), group=self.group)
        errors = {rank: error for rank, (_, error) in enumerate(found) if error is not None}
        if errors:
            raise self._raised(errors) from cause
        return [result for result, _ in found]

    def alike(self, function: Callable[[], T], differ: str) -> T:
        """As ``all``; what all ranks return must be equal. ``differ``: the error on all of them, if it is not."""
        found = self.all(function)
        if any(other != found[0] for other in found):
            raise CheckpointError(differ)
        return found[self.rank]

    def first(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 alone; all get what it returned, or its error."""
        found: T = self.all(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[assignment]
        return found

    @contextmanager
    def saying(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Say of an error inside, which all ranks have alike, what it is that failed. DCP exchanges errors as well."""
        try:
            yield
        except CheckpointException as error:
            mine = error.failures.get(self.rank, (None,))[0]
            if mine is not None and not isinstance(mine, Exception):
                raise mine from error  # this process is interrupted
            failures = {rank: as_checkpoint_error(failure[0]) for rank, failure in error.failures.items()}
            found, cause = self._raised(failures), error.__cause__ or error
        except Exception as error:  # or the group's own: another process died, or none answers
            found, cause = as_checkpoint_error(error), error
        else:
            return
        raise type(found)(f"{what if isinstance(what, str) else what()}: {found}") from cause

    def _raised(self, errors: dict[int, CheckpointError]) -> CheckpointError:
        """The error of the first rank that has one, which says whose it is unless all have it."""
        rank, error = min(errors.items())
        if len(errors) == self.size and len({str(e) for e in errors.values()}) == 1:
            return type(error)(str(error))
        return type(error)(f"rank {self.names[rank]}: {error}")


def as_checkpoint_error(error: BaseException) -> CheckpointError:
    """The error as one that can be sent to other processes, whatever it is made of."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(str(error) if isinstance(error, LpqError) else words(error))
