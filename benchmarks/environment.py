"""The machine that a result was measured on, and what this one lacks to measure anything."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lpq
from benchmarks.contenders import PEERS, installed


def record(arguments: Sequence[str], ranks: int = 1) -> dict[str, Any]:
    """Date, machine, versions and the command, which stand in every file of results."""
    start = "python -m benchmarks" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m benchmarks"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "devices": ranks,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lpq": lpq.__version__,
        "peers": {library: installed(library) for library in PEERS},
        "command": f"{start} {shlex.join(arguments)}".strip(),
    }


def _processor() -> str | None:
    """The processor's name, where the system reports it: it sets the time wherever the GPU waits for the host."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


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


def in_words(environment: dict[str, Any]) -> str:
    """One line for a page."""
    peers = [f"{library} {version or 'not installed'}" for library, version in environment["peers"].items()]
    count = f"{environment['devices']} " if environment["devices"] > 1 else ""
    processor = environment.get("processor")
    host = [f"{environment['cores']} cores of {processor}"] if processor else []
    return ", ".join(
        (
            environment["date"][:10], f"{count}{environment['device']}", *host, f"torch {environment['torch']}",
            f"Python {environment['python']}", *peers,
        )
    )  # fmt: skip
