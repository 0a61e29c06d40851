"""The machine's part in training: a device that exists, one for each process, sums in a fixed order, bf16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lpq.bench import machine
from lpq.bench.native import capability
from lpq.torch_private.operators import has_fast_bf16
from lpq.train.errors import TrainError, TrainOptionError


def pick_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the GPU if there is one. An absent device is an error."""
    if name == "auto":
        return _own(torch.device("cuda" if torch.cuda.is_available() else "cpu"), name)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainOptionError(f"device = {name!r} is no device: use cpu, cuda, cuda:N or auto") from error
    if device.type not in {"cpu", "cuda"}:
        raise TrainOptionError(f"device = {name!r}: lpq train runs on cpu and cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= (device.index or 0):
            has = f"{count} CUDA device{'s'[: count != 1]}" if count else "no CUDA device that PyTorch can use"
            raise TrainError(f"device = {name!r}, but this machine has {has}: use --device cpu, or auto")
    return _own(device, name)


def _own(device: torch.device, name: str) -> torch.device:
    """Return the GPU of this process: each that torchrun starts on a machine has its own."""
    ours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cuda" or "LOCAL_RANK" not in os.environ:
        return device
    if device.index is not None and ours > 1:
        raise TrainError(f"device = {name!r} is one device, and {ours} processes need one each: use --device cuda")
    if (count := torch.cuda.device_count()) < ours:
        raise TrainError(
            f"{ours} processes need a CUDA device each, and this machine has {count}: start at most {count} processes "
            "on it, or use --device cpu"
        )
    return torch.device("cuda", device.index if device.index is not None else int(os.environ["LOCAL_RANK"]))


@contextmanager
def fixed_sums(device: torch.device, threads: int) -> Iterator[None]:
    """Have PyTorch sum in an order that is always the same, so that a resumed run is bitwise the uninterrupted one.

    On a CPU the order follows from the number of threads; 0 leaves it to PyTorch. On a GPU an option of PyTorch fixes
    it.
    """
    threads_before = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module in a class of its own, which has no types
    fills = memory.fill_uninitialized_memory
    if threads:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        # It would write every result twice; nothing reads memory before it is written.
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fills


def fast_bf16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bf16 matrices at least about as fast as fp32 ones."""
    return device.type != "cpu" or has_fast_bf16()


def baseline_on(device: torch.device) -> str:
    """The baseline of a recipe: PyTorch's own bf16, or fp32 where the processor has no fast bf16."""
    return "bf16" if fast_bf16(device) else "fp32"


def described(device: torch.device) -> dict[str, Any]:
    """The machine and the versions with which a result was made."""
    everything = machine.record("", device)
    return {name: everything[name] for name in ("device", "processor", "cores", "python", "torch", "lpq")}


def multiplies_fp8(device: torch.device) -> bool:
    """Whether ``device`` is an NVIDIA GPU whose tensor cores take FP8: Ada, Hopper and later ones."""
    return (capability(device) or 0) >= 89
