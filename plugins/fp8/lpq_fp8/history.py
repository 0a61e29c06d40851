"""The history of delayed scaling, updated by one CUDA kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lpq.kernels.cuda import CudaKernel
from lpq_fp8.quantizer import FP8Quantizer

MOST = 3
"""The number of tensors that one launch serves: ``x``, ``w`` and ``dy`` of a layer."""
REMEMBER = CudaKernel("fp8/history.cu", "remember", MOST * "(PPPqfI)", threads=1024, waits=True)
NONE = (0,) * 6


def why_not(quantizer: FP8Quantizer) -> str | None:
    """Only delayed scaling remembers."""
    return None if quantizer.moves else f"{quantizer} remembers nothing"


def bind(
    quantizers: Sequence[FP8Quantizer], device: torch.device
) -> Callable[[Sequence[Mapping[str, Tensor]], Sequence[Mapping[str, Tensor]]], None]:
    """How what several tensors' quantizers remember is updated together."""
    index = device.index or 0
    hows = [(quantizer.history, 2.0**quantizer.margin, quantizer.algo == "most_recent") for quantizer in quantizers]
    starts = range(0, len(quantizers), MOST)
    launches = [(i, REMEMBER.bind(index, (), min(MOST, len(quantizers) - i))) for i in starts]

    def remember(states: Sequence[Mapping[str, Tensor]], stats: Sequence[Mapping[str, Tensor]]) -> None:
        arguments: list[float] = []
        for state, found, how in zip(states, stats, hows, strict=True):
            arguments += (state["amax_history"].data_ptr(), state["amax"].data_ptr(), found["amax"].data_ptr(), *how)
        arguments += NONE * (-len(quantizers) % MOST)
        for i, launch in launches:
            launch(*arguments[6 * i : 6 * (i + MOST)])

    return remember


def remember(quantizer: FP8Quantizer, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
    """As ``FP8Quantizer.remember``."""
    history = state["amax_history"]
    REMEMBER.launch(
        history.get_device(), (), 1, history.data_ptr(), state["amax"].data_ptr(), stats["amax"].data_ptr(),
        history.numel(), 2.0**quantizer.margin, quantizer.algo == "most_recent", *NONE, *NONE,
    )  # fmt: skip
