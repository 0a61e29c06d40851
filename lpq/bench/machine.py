"""The machine on which something was measured: what stands in every file of results."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lpq


def record(command: str, device: torch.device | None = None, ranks: int = 1) -> dict[str, Any]:
    """Date, machine, versions and the command."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "devices": ranks,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lpq": lpq.__version__,
        "command": command,
    }


def in_words(environment: dict[str, Any]) -> str:
    """One line for a page; the other libraries at its end, if the record has any."""
    peers = [f"{library} {version or 'not installed'}" for library, version in environment.get("peers", {}).items()]
    count = f"{environment['devices']} " if environment["devices"] > 1 else ""
    processor = environment.get("processor")
    host = [f"{environment['cores']} cores of {processor}"] if processor else []
    return ", ".join(
        (
            environment["date"][:10], f"{count}{environment['device']}", *host, f"torch {environment['torch']}",
            f"Python {environment['python']}", *peers,
        )
    )  # fmt: skip


def _processor() -> str | None:
    """The processor's name, where the system reports it: it sets the time wherever the GPU waits for the host."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
