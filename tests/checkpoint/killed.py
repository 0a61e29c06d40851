"""Models of one value, what a damaged file has, and, for each moment of a save, a process that is killed at it."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpq import checkpoint
from lpq.checkpoint import CheckpointWarning
from lpq.files import disk

MOMENTS = {
    "tensor": (torch, "save", 3, 20),
    "description": (disk, "write", 1, 20),
    "manifest": (disk, "write", 3, 20),
    "name": (disk, "publish", 1, 20),
    "aside": (disk, "publish", 1, 10),
    "in place": (disk, "publish", 2, 10),
}
"""The function that is called at a moment, at which call of it, and which step is saved: 10 is there already."""


def model(value: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)
    return net


def value(net: nn.Module) -> float:
    """The one value of all parameters."""
    (found,) = {v for p in net.parameters() for v in p.detach().flatten().tolist()}
    return float(found)


def loaded(path: Path) -> float:
    checkpoint.load(net := model(0.0), path)
    return value(net)


def saved(directory: Path, *steps: int) -> list[Path]:
    """Save models of which each has its step as its value."""
    return [checkpoint.save(model(float(step)), directory, step=step) for step in steps]


def step(number: int) -> str:
    return f"step-{number:08d}"


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Let any warning of a checkpoint fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        yield


def die_in(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, which kills its process when it is called so often; half-way, if it writes to a stream."""
    calls = 0

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            if len(args) == 2 and hasattr(args[1], "write"):
                args[1].write(b"PK half a tensor")
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return replacement


def kill_in_every_moment(rank: int, folder: Path) -> None:
    """Make ``folder/<moment>``, a run whose checkpoint of step 10 is whole and whose next one was never finished."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that was forked has no CUDA
    for moment, (module, name, call, step) in MOMENTS.items():
        checkpoint.save(model(1.0), folder / moment, step=10)
        child = os.fork()
        if child == 0:
            setattr(module, name, die_in(getattr(module, name), call))
            checkpoint.save(model(2.0), folder / moment, step=step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"{moment}: the process was not killed"
        assert os.WTERMSIG(status) == signal.SIGKILL, moment
