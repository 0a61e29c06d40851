"""The kernel table: what runs, and LPQ_KERNELS."""

from __future__ import annotations

import pytest
import torch

import lpq
from lpq.ops import KernelError, choose
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
