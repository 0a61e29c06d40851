"""Anybody's CUDA source is compiled at first use and launched on the current stream."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lpq.kernels import KernelError
from lpq.kernels.cuda import CudaKernel

pytest.importorskip("cuda.core", reason="needs cuda-core")

SOURCE = """
#include "numbers.cuh"
extern "C" __global__ void axpy(const float* x, float* y, float a, int count, i64 offset) {
    extern __shared__ float staged[];
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    staged[threadIdx.x] = x[i];
    y[i] += a * staged[threadIdx.x] * FACTOR + (float)offset;
}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LPQ_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "axpy.cu"
    path.write_text(SOURCE)
    return path


def axpy(kernel: CudaKernel, x: torch.Tensor, y: torch.Tensor, factor: int = 1) -> None:
    blocks = -(-x.numel() // 256)
    kernel.launch(x.get_device(), (f"FACTOR={factor}",), blocks, x.data_ptr(), y.data_ptr(), 0.5, x.numel(), 3)


@pytest.mark.parametrize("shared", [1024, 100 * 1024])
def test_a_source_runs_with_each_set_of_macros(source: Path, shared: int) -> None:
    kernel = CudaKernel(source, "axpy", "PPfiq", threads=256, shared=shared)
    x = torch.randn(1000, device="cuda")
    for factor in (1, 4, 1):
        y = torch.ones(1000, device="cuda")
        axpy(kernel, x, y, factor)
        assert torch.equal(y, 1 + (x * 0.5 * factor + 3))
    assert len(list((source.parent / "cache").iterdir())) == 2
    axpy(kernel, x[:0], y)  # nothing to do


def test_threads_and_streams_do_not_disturb_each_other(source: Path) -> None:
    kernel = CudaKernel(source, "axpy", "PPfiq", threads=256, shared=1024)
    x = torch.randn(1 << 16, device="cuda")
    torch.cuda.synchronize()

    def work(_: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            y = torch.ones_like(x)
            for _ in range(50):
                axpy(kernel, x, y)
            expected = torch.ones_like(x)
            for _ in range(50):
                expected += x * 0.5 + 3
            torch.cuda.current_stream().synchronize()
            return torch.equal(y, expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_a_source_that_does_not_compile_is_named(source: Path) -> None:
    source.write_text('extern "C" __global__ void axpy() { nonsense }')
    with pytest.raises(KernelError, match=r"axpy.cu does not compile for sm_.*(?s:.*)nonsense"):
        CudaKernel(source, "axpy", "", threads=32).launch(0, (), 1)


def test_too_much_shared_memory_is_an_error_in_words(source: Path) -> None:
    kernel = CudaKernel(source, "axpy", "PPfiq", threads=256, shared=1 << 20)
    with pytest.raises(KernelError, match="shared memory"):
        axpy(kernel, torch.ones(4, device="cuda"), torch.ones(4, device="cuda"))


def test_processes_that_start_together_share_the_cache(source: Path) -> None:
    code = f"""
import torch
from lpq.kernels.cuda import CudaKernel
x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
kernel = CudaKernel({str(source)!r}, "axpy", "PPfiq", threads=64, shared=1024)
kernel.launch(0, ("FACTOR=2",), 1, x.data_ptr(), y.data_ptr(), 0.5, 64, 0)
assert y.eq(2).all()
"""
    started = [subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ)) for _ in range(4)]
    assert [process.wait() for process in started] == [0] * 4
    assert [p.suffix for p in (source.parent / "cache").iterdir()] == [".cubin"]
