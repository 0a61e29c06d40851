"""The machine that a result was measured on, and what this one lacks to measure anything."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.contenders import PEERS, installed
from lpq.bench import machine


def record(arguments: Sequence[str], ranks: int = 1, program: str = "benchmarks") -> dict[str, Any]:
    """Date, machine, versions and the command, which stand in every file of results."""
    start = f"torchrun --nproc-per-node {ranks} -m" if ranks > 1 or by_torchrun() else "python -m"
    peers = {library: installed(library) for library in PEERS}
    command = f"{start} {program} {shlex.join(_that_matter(arguments))}".strip()
    return {**machine.record(command, ranks=ranks), "peers": peers}


def _that_matter(arguments: Sequence[str]) -> list[str]:
    """The arguments without the folder and its rows, which have no effect on what was measured."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--out") and argument != "--resume":
            kept.append(argument)
        skip = argument == "--out"
    return kept


def by_torchrun() -> bool:
    """Whether this is one of the processes, or the one process, that torchrun started."""
    return "WORLD_SIZE" in os.environ


def lacking(ranks: int = 1) -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return (
            "the benchmarks need a CUDA device, and PyTorch sees none here. `python -m benchmarks show` prints stored "
            "results anywhere"
        )
    if torch.cuda.device_count() < ranks:
        return f"{ranks} processes need a GPU each, and this machine has {torch.cuda.device_count()}"
    return None
