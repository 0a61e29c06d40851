"""The kernel table: what runs, and LPQ_KERNELS."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lpq
from lpq import registry
from lpq.ops import KernelError, choose, table
from lpq.registry import KernelSpec, hookimpl, refresh, register

CPU = torch.device("cpu")


class Kernels:
    """A plugin with two kernels for somebody else's format: one that runs here and a better one that does not."""

    @staticmethod
    @hookimpl
    def lpq_register_kernels() -> list[KernelSpec]:
        here = KernelSpec(op="decode", impl="test_table:decode", backend="torch", formats=("mxfp8",), device="cpu")
        there = KernelSpec(
            op="decode", impl="test_table:decode", backend="cuda", formats=("mxfp8",), min_sm=90, priority=9
        )
        return [here, there]


def decode(operand, dtype):
    return lpq.core.operations.decode_reference(operand, dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    import sys

    monkeypatch.setitem(sys.modules, "test_table", sys.modules[__name__])
    register(Kernels, name="kernels")
    yield
    refresh()


def test_the_best_that_can_run_runs_and_the_better_one_has_a_reason(kernels) -> None:
    choice = choose("decode", ("mxfp8",), CPU)
    assert choice.backend == "torch"
    assert choice.impl is decode
    assert ("test_table:decode", "runs on cuda, not on cpu") in [(k.impl, why) for k, why in choice.rejected]
    assert choose("decode", ("nvfp4",), CPU).backend == "reference"


@pytest.mark.parametrize(
    ("forced", "backend"),
    [
        ("reference", "reference"),
        ("torch", "torch"),
        ("reference,", "reference"),
        (" torch , reference ", "torch"),
        ("", "torch"),
    ],
)
def test_the_environment_names_what_may_run(kernels, monkeypatch, forced: str, backend: str) -> None:
    monkeypatch.setenv("LPQ_KERNELS", forced)
    assert choose("decode", ("mxfp8",), CPU).backend == backend


def test_a_request_that_cannot_be_met_is_an_error_and_never_falls_back(kernels, monkeypatch) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "cuda")
    with pytest.raises(KernelError, match=r"LPQ_KERNELS=cuda leaves no kernel for decode of mxfp8 on cpu") as error:
        choose("decode", ("mxfp8",), CPU)
    assert "runs on cuda, not on cpu" in str(error.value)
    assert "LPQ_KERNELS=cuda,reference" in str(error.value)
    monkeypatch.setenv("LPQ_KERNELS", "tirton")
    with pytest.raises(KernelError, match="unknown tirton; choose from reference, torch, triton, cuda"):
        choose("decode", ("mxfp8",), CPU)


def test_the_chosen_kernel_is_the_one_that_runs(kernels, monkeypatch) -> None:
    calls: list[torch.dtype] = []
    monkeypatch.setitem(globals(), "decode", lambda operand, dtype: calls.append(dtype) or operand.decode().to(dtype))
    register(Kernels, name="kernels")
    t = lpq.quantizer("mxfp8").quantize(torch.randn(4, 32))
    assert t.dequantize().shape == (4, 32)
    assert calls == [torch.float32]
    monkeypatch.setenv("LPQ_KERNELS", "reference")
    t.dequantize()
    assert len(calls) == 1


@pytest.fixture(params=[(9, 4), (11, 0)], ids=["gfx942", "gfx1100"])
def amd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """A torch that is built for AMD's GPUs, with all that kernels want; it says the architecture as a capability."""
    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.0.0", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(table, "_installed", lambda module: True)
    refresh()
    yield torch.device("cuda", 0)
    refresh()


@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8", "nvfp4")])
def test_nothing_that_is_for_nvidias_gpus_runs_on_amds(formats: tuple[str, str], amd: torch.device) -> None:
    choice = choose("gemm", tuple(lpq.quantizer(f).text for f in formats), amd)
    assert choice.backend == "reference"
    assert choice.rejected
    assert {why for _, why in choice.rejected} == {"is for NVIDIA's GPUs, and this torch is built for AMD's (ROCm)"}


def test_kernels_that_name_no_nvidia_gpu_are_offered_on_amds_and_so_are_those_in_triton(amd: torch.device) -> None:
    def offered(**where: Any) -> bool:
        return table.why_not(KernelSpec(op="decode", impl="test_table:decode", **where), (), amd) is None

    assert offered(backend="torch")
    assert not offered(backend="torch", min_sm=80)
    assert not offered(backend="torch", max_sm=90)
    assert not offered(backend="cuda")
    assert offered(backend="triton", min_sm=120)
    quantizers = {name: lpq.quantizer(name) for name in ("fp8", "mxfp8", "nvfp4")}
    for name, quantizer in quantizers.items():
        portable = [k for k in registry.kernels("quantize", (name,)) if k.backend == "triton"]
        assert len(portable) == 1
        assert table.why_not(portable[0], (quantizer,), amd) is None


def test_the_same_numbers_are_nvidias_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is passed over is so because of torch's build, not of the numbers."""
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    older, newer = (KernelSpec(op="decode", impl="test_table:decode", backend="torch", min_sm=sm) for sm in (89, 100))
    assert table.why_not(older, (), torch.device("cuda", 0)) is None
    assert table.why_not(newer, (), torch.device("cuda", 0)) == "needs compute capability 10.0, this GPU has 9.4"
