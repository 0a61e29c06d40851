"""The ranks that save or load together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from lpq.checkpoint.errors import CheckpointError
from lpq.distributed.ranks import Ranks


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


@contextmanager
def quiet() -> Iterator[None]:
    """Silence DCP's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
