"""The right to write a checkpoint, which one job has at a time: a lock on a file in the unfinished directory.

The system releases a lock when its process ends, however it ends. So files that a killed process left behind
can be distinguished from those that another process is writing. Not on a file system without locks (``flock``): there
all count as left behind.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from contextlib import suppress
from pathlib import Path

from lpq.checkpoint.errors import CheckpointError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"
"""The file with the lock. Its first line names the job that writes, each other line one that was refused meanwhile."""


class Claim:
    """An unfinished directory that belongs to this process until it is released."""

    def __init__(self, partial: Path, descriptor: int) -> None:
        self._lock, self._descriptor = partial / LOCK, descriptor
        self._releasing = threading.Lock()

    @classmethod
    def take(cls, partial: Path) -> Claim:
        """Make the directory, or empty one that was left behind and take it; refused while another job has it."""
        if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
            raise CheckpointError(f"{partial}, where it is written first, is there and is no directory: remove it")
        while True:
            partial.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            except FileNotFoundError:  # the directory was given its name, or removed, just now
                continue
            owned = _locked(descriptor)
            if not owned or _is_at(descriptor, partial / LOCK):
                break
            os.close(descriptor)
        if not owned:
            writer = _lines(partial / LOCK)[:1]
            os.write(descriptor, f"{_me()}\n".encode())
            os.close(descriptor)
            raise CheckpointError(
                f"{''.join(writer) or 'another process'} is saving it at this moment, and the checkpoint will be that "
                "one's: give each job a directory of its own, and wait for a save_async before the next save"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{_me()}\n".encode())
        for left in partial.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != LOCK:
                left.unlink()
        return cls(partial, descriptor)

    def refused(self) -> list[str]:
        """List the jobs that were refused meanwhile."""
        return _lines(self._lock)[1:]

    def release(self) -> None:
        """Release the directory for other jobs."""
        with self._releasing:
            if self._descriptor >= 0:
                if fcntl is not None:
                    with suppress(OSError):
                        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # processes that were forked have it, too
                os.close(self._descriptor)
                self._descriptor = -1


def left_behind(partial: Path) -> bool:
    """Whether no process is writing in this directory."""
    try:
        descriptor = os.open(partial / LOCK, os.O_RDWR)
    except OSError:
        return True
    try:
        return _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Whether this process has the lock now."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has none
        return True
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
