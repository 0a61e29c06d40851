"""Saves that go on in the background: an error in one is reported even if nobody waits for it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lpq.checkpoint.errors import CheckpointError, CheckpointWarning
from lpq.checkpoint.ranks import CheckpointRanks
from lpq.registry.warning import warn


class Saving:
    """A checkpoint that is being written."""

    def __init__(
        self,
        path: Path,
        future: Future[Any],
        ranks: CheckpointRanks,
        group: dist.ProcessGroup | None,
        release: Callable[[], None],
    ) -> None:
        """``group``: the group in which ranks communicate while they write. ``release``: called at the end."""
        self.path = path
        """The path that the checkpoint will have."""
        self._future, self._ranks, self._group, self._release = future, ranks, group, release
        _UNHEARD.add(self)
        future.add_done_callback(self._ended)

    def done(self) -> bool:
        """Whether writing has ended on this rank, well or badly; a warning reports an error."""
        at_end = self._future.done()
        if at_end and (failure := self.failed()) is not None:
            warn(failure, CheckpointWarning)
            _UNHEARD.discard(self)
        return at_end

    def wait(self) -> Path:
        """Wait until the checkpoint is whole and in place. Return the path, or raise the error of any rank."""
        _UNHEARD.discard(self)
        try:
            with self._ranks.error_context(failing(self.path)):
                self._future.result()
        finally:
            self._release()
            destroy(self._group)
            self._group = None
        return self.path

    def failed(self) -> str | None:
        """The error in words; None if there was none, or if the checkpoint is still being written."""
        if not self._future.done() or self._future.exception() is None:
            return None
        try:
            with self._ranks.error_context(failing(self.path)):
                self._future.result()
        except CheckpointError as error:
            return str(error)
        except BaseException as error:  # an interrupt of this process
            return f"{failing(self.path)}: {type(error).__name__}"
        return None

    def _ended(self, future: Future[Any]) -> None:
        self._release()
        if future.exception() is None:
            _UNHEARD.discard(self)


_UNHEARD: set[Saving] = set()
"""The saves of this process whose end was not yet reported. Threads write them, and end with the process, too."""


def unheard() -> tuple[str, ...]:
    """The errors that were not reported yet; each is returned once."""
    failed = {saving: failure for saving in [*_UNHEARD] if (failure := saving.failed()) is not None}
    _UNHEARD.difference_update(failed)
    return tuple(failed.values())


def ranks_of(group: dist.ProcessGroup | None, shared: bool, does: str, *, first: bool = False) -> CheckpointRanks:
    """The ranks that act together (``Ranks.of``), once no save in the background uses that group any more."""
    if group is not None:
        wait([saving._future for saving in [*_UNHEARD] if saving._ranks.group is group])
    return CheckpointRanks.of(group, shared, does, first=first)


@atexit.register
def _warn() -> None:
    """Report, at the process's end, errors that no ``wait`` raised. Python has waited for the threads by then."""
    for failure in unheard():
        warn(f"{failure} (nobody called Saving.wait)", CheckpointWarning)


def failing(target: Path) -> str:
    """The message about a checkpoint that could not be saved."""
    return f"the checkpoint {target} could not be saved, and those before it are as they were"


def destroy(group: dist.ProcessGroup | None) -> None:
    """Destroy the group that ``save_async`` made, if it made one."""
    if group is not None:
        dist.destroy_process_group(group)
