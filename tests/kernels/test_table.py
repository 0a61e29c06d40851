"""The kernel table: what runs, and LPQ_KERNELS."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import pytest
import torch

import lpq
from lpq import registry
from lpq.kernels import KernelError, choose, cublaslt, table
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
    return lpq.operations.decode_reference(operand, dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LPQ_KERNELS", raising=False)
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
    ("forced", "backend"), [
        ("reference", "reference"), ("torch", "torch"), ("reference,", "reference"), (" torch , reference ", "torch"),
        ("", "torch"),
    ]
)  # fmt: skip
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
        assert sum(table.why_not(kernel, (quantizer,), amd) is None for kernel in portable) == 1


def test_the_same_numbers_are_nvidias_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are passed over because of torch's build, not of the numbers."""
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    older, newer = (KernelSpec(op="decode", impl="test_table:decode", backend="torch", min_sm=sm) for sm in (89, 100))
    assert table.why_not(older, (), torch.device("cuda", 0)) is None
    assert table.why_not(newer, (), torch.device("cuda", 0)) == "needs compute capability 10.0, this GPU has 9.4"


# ---------------------------------------------------------------------------------------------- NVRTC


class Nvrtc:
    """A machine with GPUs, a kernel of each kind installed, and an NVRTC that writes down how often it is asked."""

    def __init__(self) -> None:
        self.found = True
        self.known = [80, 90]
        self.asked = 0
        self.capabilities = [(9, 0)]
        self.current = 0

    def nvrtcVersion(self) -> tuple[int, int, int]:
        self.asked += 1
        if not self.found:
            raise RuntimeError("Failure finding libnvrtc.so.13\nin many folders")
        return 0, 13, 0

    def nvrtcGetSupportedArchs(self) -> tuple[int, list[int]]:
        return 0, self.known


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch):
    machine = Nvrtc()

    @contextlib.contextmanager
    def device(device: torch.device):
        before, machine.current = machine.current, device.index
        yield
        machine.current = before

    def capability(device: torch.device | None = None) -> tuple[int, int]:
        return machine.capabilities[
            device.index if device is not None and device.index is not None else machine.current
        ]

    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(table, "_installed", lambda module: True)
    monkeypatch.setattr(cublaslt, "library", lambda: object())
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(nvrtc=machine))
    refresh()
    yield machine
    monkeypatch.undo()
    refresh()


GPU = torch.device("cuda", 0)
STEPS = {
    "quantize": ("mxfp8", "mxfp8"), "measure": ("fp8",), "decode": ("nvfp4",), "transpose": ("nvfp4(block=16x16)",),
    "remember": ("fp8(scaling=delayed)",), "tile": ("fp8",), "gemm": ("nvfp4", "nvfp4"),
}  # fmt: skip
REMEDY = (
    'NVRTC, which compiles the CUDA kernels, cannot be loaded. Install it: pip install "lpq[cuda]" nvidia-cuda-nvrtc'
)


@pytest.mark.parametrize("op", STEPS)
def test_without_nvrtc_another_kernel_serves_and_the_reason_is_told(op: str, nvrtc: Nvrtc) -> None:
    before = choose(op, STEPS[op], GPU)
    assert before.backend == "cuda"
    nvrtc.found = False
    refresh()
    choice = choose(op, STEPS[op], GPU)
    assert choice.backend == {"gemm": "torch"}.get(op, "triton" if op in list(STEPS)[:4] else "reference")
    assert choice.broken == ()  # nobody's plugin is at fault
    reasons = [why for kernel, why in choice.rejected if kernel.backend == "cuda"]
    assert reasons
    assert all(why.startswith(REMEDY) and "\n" not in why for why in reasons)


def test_without_cuda_core_the_reason_says_what_to_install(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_installed", lambda module: module != "cuda.core")
    refresh()
    choice = choose("quantize", STEPS["quantize"], GPU)
    assert choice.backend == "triton"
    reasons = {why for kernel, why in choice.rejected if kernel.backend == "cuda"}
    assert reasons == {'needs cuda.core, which is not installed: pip install "lpq[cuda]"'}


def test_without_nvrtc_a_request_for_cuda_kernels_is_an_error_in_words(
    nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "cuda")
    assert choose("decode", ("mxfp8",), GPU).backend == "cuda"
    nvrtc.found = False
    refresh()
    with pytest.raises(KernelError, match=r"LPQ_KERNELS=cuda leaves no kernel for decode of mxfp8 on cuda") as error:
        choose("decode", ("mxfp8",), GPU)
    assert REMEDY in str(error.value)
    monkeypatch.setenv("LPQ_KERNELS", "cuda,reference")
    assert choose("decode", ("mxfp8",), GPU).backend == "reference"


@pytest.mark.parametrize("found", [True, False])
def test_nvrtc_is_asked_once_and_only_where_it_matters(found: bool, nvrtc: Nvrtc) -> None:
    nvrtc.found = found
    for op, operands in STEPS.items():
        choose(op, operands, CPU)
    assert nvrtc.asked == 0
    for op, operands in STEPS.items():
        choose(op, operands, GPU)
    assert nvrtc.asked == 1
    nvrtc.found = not found  # as after pip install
    refresh()
    assert (choose("decode", ("mxfp8",), GPU).backend == "cuda") is nvrtc.found
    assert nvrtc.asked == 2


def test_a_gpu_that_nvrtc_does_not_know_is_left_to_others(nvrtc: Nvrtc) -> None:
    nvrtc.capabilities = [(9, 0), (12, 1)]
    assert choose("decode", ("mxfp8",), GPU).backend == "cuda"
    choice = choose("decode", ("mxfp8",), torch.device("cuda", 1))
    assert choice.backend == "triton"
    ((_, reason),) = choice.rejected
    assert "is of CUDA 13.0 and compiles nothing for compute capability 12.1: install a newer one" in reason
    nvrtc.known = [*nvrtc.known, 121]
    refresh()
    assert choose("decode", ("mxfp8",), torch.device("cuda", 1)).backend == "cuda"


# ---------------------------------------------------------------------------------------------- several GPUs


def test_each_of_several_gpus_has_its_own_answer(nvrtc: Nvrtc) -> None:
    """Whichever is the current one; a device without a number is the current one, each time anew."""
    nvrtc.capabilities = [(7, 5), (9, 0)]
    backends = {"7.5": "triton", "9.0": "cuda"}
    for current in (0, 1, 0):
        nvrtc.current = current
        for index, (major, minor) in enumerate(nvrtc.capabilities):
            assert choose("decode", ("mxfp8",), torch.device("cuda", index)).backend == backends[f"{major}.{minor}"]
        major, minor = nvrtc.capabilities[current]
        assert choose("decode", ("mxfp8",), torch.device("cuda")).backend == backends[f"{major}.{minor}"]


def test_what_a_kernel_says_against_it_is_about_the_gpu_in_question(nvrtc: Nvrtc) -> None:
    """A product is made of exact forms, which an older GPU beside this one has none of."""
    nvrtc.capabilities = [(7, 5), (9, 0)]
    older, newer = (torch.device("cuda", index) for index in range(2))
    for current in (0, 1):
        nvrtc.current = current
        refresh()
        assert choose("gemm", ("mxfp8", "nvfp4"), newer).backend == "cuda"
        assert choose("gemm", ("mxfp8", "nvfp4"), older).backend == "reference"
        assert nvrtc.current == current
