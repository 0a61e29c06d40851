"""What delayed scaling remembers, updated by one CUDA kernel."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lpq.kernels.cuda import CudaKernel
from lpq_fp8.quantizer import FP8Quantizer

REMEMBER = CudaKernel("fp8/history.cu", "remember", "PPPqfI", threads=1024, waits=True)


def why_not(quantizer: FP8Quantizer) -> str | None:
    """Only delayed scaling remembers."""
    return None if quantizer.moves else f"{quantizer} remembers nothing"


def remember(quantizer: FP8Quantizer, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
    """As ``FP8Quantizer.remember``."""
    history, amax, newest = state["amax_history"], state["amax"], stats["amax"]
    REMEMBER.launch(
        history.get_device(), (), 1, history.data_ptr(), amax.data_ptr(), newest.data_ptr(), history.numel(),
        2.0**quantizer.margin, quantizer.algo == "most_recent",
    )  # fmt: skip
