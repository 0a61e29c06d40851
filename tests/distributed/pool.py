"""Processes that stay: each is one rank of a group, and runs what it is handed, one function after another.

A function finds the process as a new one would be, but for what is reset nowhere: what it patches and leaves patched,
and what modules keep. What fails in one rank ends all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import gloo_threads  # noqa: F401  (groups that are made later have one thread)
import torch
import torch.distributed as dist
from support import plugins
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as forget_shardings

from lpq import registry

HOST = "127.0.0.1"
"""Where ranks find each other. Whoever starts them keeps the store, which tells those that wait at once."""
TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for another one in a collective."""
PATIENCE = 600.0
"""Seconds after which a function that has not ended in all ranks is taken to hang."""
MOST_THREADS = 96
"""Threads with which a rank is not used again. Each group that a call makes has one, for torch keeps groups."""
DIES_WITH_ITS_PARENT = 1
"""``PR_SET_PDEATHSIG`` of prctl(2): the signal that a process gets at the end of the one that forked it."""
GRACE = 1.0
"""Seconds that ranks have to tell their own errors, once one has told its."""
IMPORTED = [
    "pytest", "hypothesis", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._inductor.compile_fx",
    "lpq.checkpoint", "lpq.optim",
]  # fmt: skip
"""Modules that most tests need. None starts a thread, asks for a GPU or for plugins."""


class RankError(Exception):
    """The errors of ranks, each with its rank."""


def context() -> Any:
    """How processes are started.

    To import torch takes one some seconds. So these are forked from one that imported it, and did what
    ``preloaded.py`` does; but where there are GPUs they are new, as a process that was forked may have none.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each would start processes that import torch
    if torch.cuda.is_available():
        return torch.multiprocessing.get_context("spawn")  # type: ignore[no-untyped-call]
    multiprocessing.set_forkserver_preload(["no_garbage", *IMPORTED, "preloaded"])
    with contextlib.chdir(Path(__file__).parent):  # it looks for that module in the folder where it starts
        multiprocessing.forkserver.ensure_running()
    return torch.multiprocessing.get_context("forkserver")  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------------------- in a rank


@dataclass(frozen=True)
class Call:
    """A function for ranks to run, and where the caller is."""

    function: Callable[..., None]
    args: tuple[Any, ...]
    environment: dict[str, str]
    directory: str
    path: list[str]
    hidden: frozenset[plugins.Place]
    """Distributions whose plugins the caller does not find."""

    def run(self, rank: int) -> None:
        """Run it as in a new process."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.path[:] = self.path
        if plugins.hidden != self.hidden:
            plugins.hide(self.hidden)
            registry.refresh()
        _forget_plugins()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        forget_compiled()
        with warnings.catch_warnings():
            self.function(rank, *self.args)
        dist.barrier()


def forget_compiled() -> None:
    """Forget what is compiled, and then how torch shards: a compiler leaves meshes there that are none. To find that
    out again takes a tenth of a call's time."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.FRAME_COUNTER:
        forget_shardings()
    torch.compiler.reset()


_found: list[object] = []
"""The registry as a call found it: its epoch, and the plugins that it was to load."""


def _forget_plugins() -> None:
    """Forget what calls before have registered. To read all metadata again takes a hundredth of a second."""
    plugins = os.environ.get("LPQ_LOAD_PLUGINS")
    if _found != [registry.epoch(), plugins]:
        registry.refresh()
        _found[:] = registry.epoch(), plugins


def _stacks(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks{rank}"


def _serve(calls: Connection, rank: int, ranks: int, backend: str, folder: str, port: int) -> None:
    """Say that this rank is ready, and take calls until whoever makes them is gone."""
    gc.freeze()  # what was imported is left alone: to look through it takes up to a tenth of a rank's time
    ctypes.CDLL(None).prctl(DIES_WITH_ITS_PARENT, signal.SIGKILL)  # one that is paused would not see the pipe close
    with _stacks(folder, rank).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        store = dist.TCPStore(HOST, port)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        try:
            calls.send(None)
            while True:
                calls.send(_answer(rank, calls.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)  # gloo's threads now and then abort the interpreter's own way out


def _answer(rank: int, call: bytes) -> str | None:
    """Nothing, or what went wrong."""
    try:
        pickle.loads(call).run(rank)
    except BaseException:
        return traceback.format_exc()
    finally:
        gc.collect()
        gc.freeze()  # what modules keep, as what was imported
        sys.stdout.flush()
        sys.stderr.flush()
    return None


# ---------------------------------------------------------------------------------- in the test


class Pool:
    """So many ranks of one group, started once."""

    def __init__(self, ranks: int, backend: str = "gloo") -> None:
        self.ranks, self.path = ranks, list(sys.path)
        self._folder = tempfile.TemporaryDirectory()
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._store: dist.TCPStore | None = store
        self._calls: list[Connection] = []
        self._processes: list[Any] = []
        starting = context()
        for rank in range(ranks):
            here, there = starting.Pipe()
            _stacks(self._folder.name, rank).touch()
            args = (there, rank, ranks, backend, self._folder.name, store.port)
            process = starting.Process(target=_serve, args=args)
            process.start()
            there.close()
            self._calls.append(here)
            self._processes.append(process)
        self._raise(PATIENCE)
        self._signal(signal.SIGSTOP)

    def serves(self) -> bool:
        """Whether its ranks run, and can import what can be imported here."""
        return self.path == sys.path and bool(self._processes)

    def run(self, function: Callable[..., None], *args: Any, patience: float = PATIENCE) -> None:
        """Run ``function(rank, *args)`` in all ranks; ``RankError`` if it failed in any, which ends all."""
        hidden = frozenset(plugins.hidden)
        call = pickle.dumps(Call(function, args, dict(os.environ), os.getcwd(), self.path, hidden))
        self._signal(signal.SIGCONT)
        self._send(call)
        self._raise(patience)
        self._signal(signal.SIGSTOP)
        if self._threads() > MOST_THREADS:
            self.close()

    def _signal(self, number: signal.Signals) -> None:
        """Pause the ranks until the next call, or wake them: the threads of idle ranks take a tenth of all time."""
        for process in self._processes:
            with suppress(ProcessLookupError):  # it is gone, as its answer will say
                os.kill(process.pid, number)

    def _threads(self) -> int:
        """The threads of the first rank, where the system tells."""
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return len([*tasks.iterdir()]) if tasks.is_dir() else 0

    def _raise(self, patience: float) -> None:
        """Wait for all ranks; if one failed, or the test is interrupted, the pool is closed."""
        try:
            failed = self._answers(patience)
            if failed:
                raise RankError("\n".join(failed))
        except BaseException:
            self.close()
            raise

    def _send(self, call: bytes) -> None:
        for calls in self._calls:
            try:
                calls.send_bytes(call)
            except OSError:  # it is gone, as its answer will say
                continue

    def _answers(self, patience: float) -> list[str]:
        """Return the errors of ranks, in their order, and where those are that say nothing."""
        waiting = dict(zip(self._calls, range(self.ranks), strict=True))
        failed: list[str] = []
        end = time.monotonic() + patience
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                return failed + self._silent(sorted(waiting.values()), GRACE if failed else patience)
            for calls in ready:
                assert isinstance(calls, Connection)
                rank = waiting.pop(calls)
                error = self._answer(calls, rank)
                if error is not None:
                    if not failed:
                        end = min(end, time.monotonic() + GRACE)
                    failed.append(f"rank {rank} of {self.ranks}: {error}")
        return failed

    def _answer(self, calls: Connection, rank: int) -> str | None:
        try:
            answer: str | None = calls.recv()
        except (EOFError, OSError):
            self._processes[rank].join(GRACE)
            ended = f"the process ended with exit code {self._processes[rank].exitcode}"
            stacks = _stacks(self._folder.name, rank).read_text()  # of one that ended by a fault or an abort
            return f"{ended}, and was at\n{stacks}" if stacks else ended
        return answer

    def _silent(self, ranks: list[int], seconds: float) -> list[str]:
        """Where those ranks are: others may have failed while they waited for these."""
        self._signal(signal.SIGUSR1)
        stacks = [_stacks(self._folder.name, rank) for rank in ranks]
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not all(stack.stat().st_size for stack in stacks):
            time.sleep(GRACE / 100)
        return [
            f"rank {rank} of {self.ranks} has not ended {seconds:g} s later, and is at\n{stack.read_text()}"
            for rank, stack in zip(ranks, stacks, strict=True)
        ]

    def close(self) -> None:
        """End the processes."""
        for calls, process in zip(self._calls, self._processes, strict=True):
            calls.close()
            process.kill()
        for process in self._processes:
            process.join()
        self._calls, self._processes, self._store = [], [], None
        self._folder.cleanup()
