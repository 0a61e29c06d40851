"""The ranks that save or load together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from lpq.checkpoint.errors import CheckpointError
from lpq.distributed.ranks import Ranks

Meshes = frozenset[tuple[int, ...]]
"""For each mesh of a model, the ranks over which its tensors lie."""
ALIKE = "Build and convert the model alike on all ranks, and have them read the same file"


class CheckpointRanks(Ranks):
    """The ranks of a group, or of the default one; an error on any rank is a ``CheckpointError`` on all."""

    error = CheckpointError

    @contextmanager
    def error_context(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Add to an error inside, which all ranks have alike, the name of the task. DCP exchanges errors as well."""
        try:
            yield
        except CheckpointException as error:
            mine = error.failures.get(self.rank, (None,))[0]
            if mine is not None and not isinstance(mine, Exception):
                raise mine from error  # this process is interrupted
            failures = {self.names[rank]: self.as_error(failure[0]) for rank, failure in error.failures.items()}
            report, cause = self.raised(failures), error.__cause__ or error
        except Exception as error:  # or the group's own: another process died, or none answers
            report, cause = self.as_error(error), error
        else:
            return
        raise type(report)(f"{what if isinstance(what, str) else what()}: {report}") from cause

    def check_alike(self, place: str, meshes: Meshes, optimizers: Sequence[str]) -> None:
        """Raise on all ranks unless they save or load at one place, one model, with optimizers of the same kinds."""
        same = "Pass the same path on all ranks, one that all ranks can read"
        self.equal([place], "the ranks were given different paths", same)
        self.check_one_model([*self.exchange(meshes).values()])
        self.equal(
            optimizers, "the ranks were given different optimizers", "Pass the same on all ranks", "no optimizer"
        )

    def check_one_model(self, of_ranks: Sequence[Meshes]) -> None:
        """Refuse ranks that have separate models, whose tensors would be mixed because they have the same names.

        Ranks have one model if its meshes connect them all, directly or through other ranks.
        """
        meshes = sorted({mesh for own in of_ranks for mesh in own})
        if strangers := [mesh for mesh in meshes if not {*mesh} <= {*self.names}]:
            raise CheckpointError(
                f"a tensor lies over the ranks {[*strangers[0]]}, and the ranks that call this together "
                f"are {self.names}: call it on all ranks of the model, with a process_group of just these"
            )
        groups: list[set[int]] = [{rank} for rank in self.names]
        for mesh in meshes:
            neighbours = [group for group in groups if group & {*mesh}]
            groups = [group for group in groups if group not in neighbours] + [set[int]().union(*neighbours)]
        if meshes and len(groups) > 1:
            listing = " and ".join(str(sorted(group)) for group in sorted(groups, key=min))
            raise CheckpointError(
                f"no tensor joins the ranks {listing}, so these have models of their own, and one would hide the "
                "other: call it for each by itself, with a directory of its own and process_group=mesh.get_group(), or "
                "a group of all ranks of its mesh"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence DCP's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
