"""The machine that a result was measured on, and what this one lacks to measure anything."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.contenders import PEERS, installed
from lpq.bench import machine


def record(arguments: Sequence[str], ranks: int = 1) -> dict[str, Any]:
    """Date, machine, versions and the command, which stand in every file of results."""
    start = "python -m benchmarks" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m benchmarks"
    peers = {library: installed(library) for library in PEERS}
    return {**machine.record(f"{start} {shlex.join(arguments)}".strip(), ranks=ranks), "peers": peers}


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
