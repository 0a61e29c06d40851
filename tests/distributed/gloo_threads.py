"""A group of gloo gets one thread that runs collectives, and not two, with which torch corrupts the heap. All groups
of a process share the thread that reads.

The two note in one ``std::string``, without a lock, which collective ended last (``ProcessGroupGloo::runLoop``, in
torch 2.11 and 2.13). If both write at once, and the name has more than 15 letters, such as ALLGATHER_COALESCED
(gathers of DTensors), the process ends with "free(): invalid pointer" or the like: once in some hundred thousand
gathers. Once this is imported, groups that are made later have one thread.

The thread that reads is of a device, and wakes up a hundred times a second. Torch makes a device for each group.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from torch.distributed import ProcessGroupGloo

_made = ProcessGroupGloo.__init__


@functools.cache
def _device_of(process: int) -> Any:
    """The device of a process: one that was forked has no threads of the process that it was forked from."""
    return ProcessGroupGloo.create_default_device()


@functools.wraps(_made)
def _with_one_thread(self: Any, store: Any, rank: int, size: int, timeout: Any = None, **options: Any) -> None:
    how: Any = ProcessGroupGloo._Options()
    how._devices, how._threads = [_device_of(os.getpid())], 1
    if timeout is not None:
        how._timeout = timeout
    if "enable_reconfigure" in options:  # in torch 2.15
        how.enable_reconfigure = options.pop("enable_reconfigure")
    _made(self, store, rank, size, how, **options)


ProcessGroupGloo.__init__ = _with_one_thread  # type: ignore[assignment]
