"""Saves that go on in the background: an error in one is reported even if nobody waits for it."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lpq.checkpoint.errors import CheckpointError, CheckpointWarning
from lpq.checkpoint.ranks import Ranks


class Saving:
    """A checkpoint that is being written."""

    def __init__(
        self,
        path: Path,
        future: Future[Any],
        ranks: Ranks,
        group: dist.ProcessGroup | None,
        release: Callable[[], None],
    ) -> None:
        """``group``: the one in which the ranks talk while they write. ``release``: called at the end."""
        self.path = path
        """The path that the checkpoint will have."""
        self._future, self._ranks, self._group, self._release = future, ranks, group, release
        _unheard.add(self)
        future.add_done_callback(self._ended)

    def done(self) -> bool:
        """Whether writing has ended on this rank, well or badly; a warning reports an error."""
        ended = self._future.done()
        if ended and (failure := self.failed()) is not None:
            warnings.warn(failure, CheckpointWarning, stacklevel=2)
            _unheard.discard(self)
        return ended

    def wait(self) -> Path:
        """Wait until the checkpoint is whole and in its place, and return its path; raise the error of any rank."""
        _unheard.discard(self)
        try:
            with self._ranks.saying(failing(self.path)):
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
            with self._ranks.saying(failing(self.path)):
                self._future.result()
        except CheckpointError as error:
            return str(error)
        except BaseException as error:  # an interrupt of this process
            return f"{failing(self.path)}: {type(error).__name__}"
        return None

    def _ended(self, future: Future[Any]) -> None:
        self._release()
        if future.exception() is None:
            _unheard.discard(self)


class _Unheard:
    """The saves of this process whose end was not yet reported. Threads write them, and end with the process, too."""

    def __init__(self) -> None:
        self._savings: dict[int, Saving] = {}
        self._lock = threading.Lock()

    def add(self, saving: Saving) -> None:
        with self._lock:
            self._savings[id(saving)] = saving

    def discard(self, saving: Saving) -> None:
        with self._lock:
            self._savings.pop(id(saving), None)

    def pop_errors(self) -> tuple[str, ...]:
        """The errors that were not reported yet; each is returned once."""
        with self._lock:
            savings = [*self._savings.values()]
        failed = [(saving, failure) for saving in savings if (failure := saving.failed()) is not None]
        for saving, _ in failed:
            self.discard(saving)
        return tuple(failure for _, failure in failed)

    def settle(self, group: dist.ProcessGroup) -> None:
        """Wait until no rank talks in this group any more."""
        with self._lock:
            writing = [saving._future for saving in self._savings.values() if saving._ranks.group is group]
        wait(writing)


_unheard = _Unheard()
unheard = _unheard.pop_errors


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a group, or of the default one, once no save in the background uses that group any more."""
    if group is not None:
        _unheard.settle(group)
    return Ranks(group)


@atexit.register
def _warn() -> None:
    """Report, at the process's end, errors that no ``wait`` raised. Python has waited for the threads by then."""
    for failure in unheard():
        warnings.warn(f"{failure} (nobody called Saving.wait)", CheckpointWarning, stacklevel=2)


def failing(target: Path) -> str:
    """The message about a checkpoint that could not be saved."""
    return f"the checkpoint {target} could not be saved, and those before it are as they were"


def destroy(group: dist.ProcessGroup | None) -> None:
    """Destroy the group that ``save_async`` made, if it made one."""
    if group is not None:
        dist.destroy_process_group(group)
