"""A GPU whose memory is that of the CPU, and which does nothing: for counts of what the host does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq
from lpq.kernels import cublaslt, cuda, table, tiles
from lpq.kernels.cuda import CudaKernel
from lpq.operations import produced_tiles
from lpq.registry import refresh

LPQ = (str(Path(lpq.__file__).parent), str(Path(lpq.__file__).parents[1] / "plugins"))
HOPPER, BLACKWELL = 90, 100


def calls_of(function: Callable[[], Any], idle: Sequence[Callable[..., Any]] = ()) -> int:
    """How many Python functions of lpq are called, but for what ``idle`` kernels call."""
    codes, count, inside = [kernel.__code__ for kernel in idle], 0, 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count, inside
        if frame.f_code in codes:
            inside += {"call": 1, "return": -1}.get(event, 0)
        comprehension = frame.f_code.co_name.startswith("<")  # which is a call before Python 3.12
        if event == "call" and not inside and not comprehension and frame.f_code.co_filename.startswith(LPQ):
            count += 1

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


ALLOCATE = torch._C._dynamo.guards._empty_strided_cpu


class Gpu:
    """Counts what is launched."""

    def __init__(self) -> None:
        self.sm = HOPPER
        self.launches = self.allocated = 0

    def launch(self, kernel: CudaKernel, blocks: int, arguments: tuple[float, ...]) -> None:
        kernel._slots.pack(*arguments)  # which fails if there are others than the kernel takes
        self.launches += blocks > 0

    def allocate(self, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As Inductor's, which bypasses the dispatcher."""
        self.allocated += 1
        return ALLOCATE(size, strides, dtype)

    def product(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        self.launches += 1
        return torch.empty((rows, cols), dtype=dtype)

    def elsewhere(self, kernel: Any, *_: Any) -> str | None:
        """The table's answer: this GPU has all but Triton, which stands after what is in CUDA."""
        return "not here" if kernel.backend == "triton" or (kernel.min_sm or 0) > self.sm else None


class CublasLt:
    """A library that has an algorithm for every product."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value, arguments[-2]._obj.workspace = 1, 1024
            self.gpu.launches += name == "cublasLtMatmul"
            return 0

        return call


@contextmanager
def imitated_gpu() -> Iterator[Gpu]:
    """A GPU whose memory is that of the CPU, and which does nothing. All that lpq does on the host is done.

    Torch's product of bf16 is idle as well: on a CPU it takes seconds, and operators of its own. Two cannot run so:
    the driver's launch itself, and ``scaled_product``, as no CPU has a product of bf16 with sums in fp32 as its result.
    It is for factors of rows, which no recipe here multiplies in bf16.
    """
    gpu = Gpu()
    where = {
        "current_device": lambda: 0, "device": lambda index: nullcontext(),
        "get_device_capability": lambda device: divmod(gpu.sm, 10),
    }  # fmt: skip
    raw = {"current_device": lambda: 0, "current_stream": lambda index: 0}
    why_not = produced_tiles.why_not
    kept = cublaslt._plan, cublaslt._handle, cublaslt._matmul, cublaslt._attribute

    def launch(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        gpu.launch(self, blocks, arguments)

    def bind(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int) -> Callable[..., None]:
        return lambda *arguments: gpu.launch(self, blocks, arguments)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return gpu.product(x.shape[0], weight.shape[0], torch.bfloat16)

    def scaled(a: Tensor, b: Tensor, *how: Any, out: Tensor | None = None) -> Tensor:
        _, _, _, _, dtype, _ = how
        return gpu.product(a.shape[0], b.shape[1], dtype)

    def scaled_in_blocks(a: Tensor, b: Tensor, *scales: Any, output_dtype: torch.dtype, **how: Any) -> Tensor:
        return gpu.product(a.shape[0], b.shape[1], output_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LPQ_KERNELS", raising=False)
        for name, function in where.items():
            patch.setattr(torch.cuda, name, function)
        for name, function in raw.items():
            patch.setattr(f"lpq.torch_private.cuda.{name}", function)
        patch.setattr(Tensor, "get_device", lambda self: 0)
        patch.setattr(table, "_elsewhere", gpu.elsewhere)
        patch.setattr(table, "_installed", lambda module: True)
        patch.setattr(cuda, "why_not", lambda device: None)
        patch.setattr(tiles, "multiprocessors", lambda device: 132)
        patch.setattr(produced_tiles, "why_not", lambda *what: why_not(*what[:-1], torch.device("cuda", 0)))
        patch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", gpu.allocate)
        patch.setattr(CudaKernel, "launch", launch)
        patch.setattr(CudaKernel, "bind", bind)
        library = CublasLt(gpu)
        patch.setattr(cublaslt, "library", lambda: library)
        patch.setattr(cublaslt, "_DESCRIPTIONS", [])  # descriptions of imitated plans are not destroyed afterwards
        patch.setattr(cublaslt, "_destroy_what_is_left", lambda: None)
        for name in ("ALIGNED", "SCALED_ALIGNED"):
            patch.setattr(cublaslt, name, 1)  # to more a CPU's memory is aligned by chance
        patch.setattr("lpq_fp8.gemm.scaled_matmul", scaled)
        for module in ("lpq_fp8.gemm", "lpq_mxfp8.gemm", "lpq_nvfp4.gemm"):
            patch.setattr(f"{module}.scaled_mm", scaled_in_blocks)
        patch.setattr(nn.functional, "linear", linear)
        _forget(kept)
        yield gpu
        _forget(kept)


def _forget(kept: Sequence[Any]) -> None:
    for function in kept:
        function.cache_clear()
    refresh()
