"""Writing files that are either whole or do not count: in an unfinished directory beside their place, which one job has
at a time.

The directory is lpq's by a lock on a file in it, which the system releases when its process ends, however it ends. On a
file system without locks all files count as left behind by a process that was killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import lock_descriptor, unlock_descriptor

from lpq.files import disk
from lpq.files.disk import PARTIAL
from lpq.files.errors import CheckpointError, CheckpointWarning
from lpq.registry.showing import listed
from lpq.registry.warning import warn

LOCK = "lpq.lock"
"""The file with the lock. Its first line names the job that writes, each other line one that was refused meanwhile."""


class Claim:
    """An unfinished directory that belongs to this process until it is released."""

    def __init__(self, partial: Path, descriptor: int) -> None:
        self.partial = partial
        """The directory to write in."""
        self._lock, self._descriptor = partial / LOCK, descriptor
        self._releasing = threading.Lock()

    @classmethod
    def take(cls, target: Path) -> Claim:
        """Make the directory for what will be ``target``, or empty one that a job of lpq's left behind and take it.

        Refused while another job has it, and where it is somebody else's.
        """
        partial = target.with_name(target.name + PARTIAL)
        while True:
            try:
                partial.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                _check_owner(partial)
                raise CheckpointError(f"{partial} cannot be made: {error.strerror or error}") from error
            try:
                _check_owner(partial)
                descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            except FileNotFoundError:  # the directory was given its name, or removed, just now
                continue
            if not _locked(descriptor):
                writer = _lines(partial / LOCK)[:1]
                os.write(descriptor, f"{_me()}\n".encode())
                os.close(descriptor)
                raise CheckpointError(
                    f"{''.join(writer) or 'another process'} is saving it at this moment, and the checkpoint will be "
                    "that one's: give each job a directory of its own, and wait for a save_async before the next save"
                )
            if _is_at(descriptor, partial / LOCK):
                break
            os.close(descriptor)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{_me()}\n".encode())
            _empty(partial)
        except BaseException:
            os.close(descriptor)  # or this process would have the lock for good
            raise
        return cls(partial, descriptor)

    def publish(self, target: Path, last: str) -> None:
        """Rename the written directory once it is on the disk.

        An empty directory that has the name is filled, the file ``last`` at the end, and stays the directory that it
        is: a process may stand in it.
        """
        if not target.is_dir():
            disk.publish(self.partial, target)
            (target / LOCK).unlink(missing_ok=True)
            return
        if there := sorted(entry.name for entry in target.iterdir()):
            raise CheckpointError(f"{target} is not empty any more: {listed(there)} came into it meanwhile")
        for entry in sorted(self.partial.iterdir(), key=lambda entry: entry.name == last):
            if entry.name != LOCK:
                entry.replace(target / entry.name)
        disk.flush(target)

    def refused(self) -> list[str]:
        """List the jobs that were refused meanwhile."""
        return _lines(self._lock)[1:]

    def release(self) -> None:
        """Release it for other jobs. Files without a name yet were not finished, and are removed."""
        with self._releasing:
            if self._descriptor < 0:
                return
            if _is_at(self._descriptor, self._lock) and _lines(self._lock)[:1] == [_me()]:
                try:
                    _empty(self.partial)
                    self._lock.unlink()
                    with suppress(OSError):  # another job took it just now
                        self.partial.rmdir()
                except OSError as error:
                    why = error.strerror or error
                    warn(f"{self.partial} is not finished, and cannot be removed: {why}", CheckpointWarning)
            with suppress(OSError):
                unlock_descriptor(self._descriptor)  # processes that were forked have it, too
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file for ``torch.save``, which becomes ``target`` if the code inside succeeds."""
    target = disk.resolved(target)
    claim = Claim.take(target)
    try:
        with (claim.partial / target.name).open("wb") as file:
            yield file
        disk.publish(claim.partial / target.name, target)
    except RuntimeError as error:  # where the disk is full, torch tells a position, in the context of the fault
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        claim.release()


def left_behind(partial: Path) -> bool:
    """Whether this is an unfinished directory of lpq's in which no process is writing."""
    try:
        descriptor = os.open(partial / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return _locked(descriptor)
    finally:
        os.close(descriptor)


def _check_owner(partial: Path) -> None:
    """Refuse a directory that lpq did not make."""
    where = f"{partial}, where it is written first, is there and"
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise CheckpointError(f"{where} is no directory: move it away")
    if partial.is_dir() and (there := sorted(entry.name for entry in partial.iterdir())) and LOCK not in there:
        raise CheckpointError(f"{where} holds {listed(there)}, which lpq did not write: move it away")


def _empty(partial: Path) -> None:
    """Remove all files but the lock, which marks the rest as lpq's."""
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _locked(descriptor: int) -> bool:
    """Whether this process has the lock now."""
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:  # the file system has none
        return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(errors="replace")[:1000].splitlines() if line.isprintable()]
    except OSError:
        return []


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
