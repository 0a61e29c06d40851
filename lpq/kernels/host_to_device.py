"""Numbers of the host, sent to a device without waiting for it: the tables of launches over several matrices.

A copy reads the host's memory when the device comes to it. A CUDA graph would read it again at each replay, when it
holds something else; so launches are recorded that carry the numbers as their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq import registry
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.table import why_not
from lpq.registry import KernelSpec

WORDS = 448
"""Words of 8 bytes that one launch carries."""
WRITE = CudaKernel("common/words.cu", "write_words", f"P({'q' * WORDS})q", threads=WORDS, waits=True)
SPEC = KernelSpec.cuda("upload", "lpq.kernels.host_to_device:write_words")


def on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers as a tensor on a device."""
    numbers = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return numbers.to(device)
    reason = _why_not_recorded(device)
    if not captured(device):
        return numbers.pin_memory().to(device, non_blocking=True)
    if reason is not None:
        raise RuntimeError(
            "a launch over several weights cannot be recorded in a CUDA graph here: their addresses are sent by a "
            f"kernel then, which {reason}. Call it outside of the capture"
        )
    return write_words(numbers, device)


def recording() -> bool:
    """Whether launches on the current stream are being recorded in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def captured(device: torch.device) -> bool:
    """Whether launches on a device are being recorded in a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # torch reports it for the current device only
        return torch.cuda.is_current_stream_capturing()


def write_words(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, by launches that carry them."""
    raw = torch.zeros(-(-numbers.nbytes // 8), dtype=torch.int64)
    raw.view(numbers.dtype)[: numbers.numel()] = numbers.flatten()
    out = torch.empty_like(raw, device=device)
    for first in range(0, len(raw), WORDS):
        words = raw[first : first + WORDS].tolist()
        rest = [0] * (WORDS - len(words))
        WRITE.launch(out.get_device(), (), 1, out.data_ptr() + 8 * first, *words, *rest, len(words))
    return out.view(numbers.dtype)[: numbers.numel()].view(numbers.shape)


@registry.cached
def _why_not_recorded(device: torch.device) -> str | None:
    """Why the kernel cannot run on this device. If it can, it is loaded: during a recording it is too late for that."""
    reason = why_not(SPEC, (), device)
    if reason is None:
        WRITE.ready(device.index)
    return reason
