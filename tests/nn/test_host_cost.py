"""The cost of a linear layer to the host: calls, operators and buffers, and not time, with kernels that do nothing.

A change that adds a function call, an operator or a buffer to the way from ``Linear`` to a kernel fails here, and so
does one that adds an operator, a buffer or a launch to what launches the CUDA kernels. If it is worth its cost, raise
the number and say why.
"""

from __future__ import annotations

import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lpq
from lpq.formats.format import Storage
from lpq.kernels import cublaslt, cuda, table, tiles
from lpq.kernels.cuda import CudaKernel
from lpq.operations import bound, multiplying, sides
from lpq.registry import refresh

SIZE = 128
COSTS = {
    # recipe: lpq's operators, all operators (nn.Linear: 29), buffers allocated for operands and results, Python calls.
    # A call looks for the input among those that siblings encoded; an operator detaches one of which a view is kept.
    "fp8-current": (0, 20, 15, 40),
    "fp8-row": (0, 20, 15, 35),
    "mxfp8": (0, 20, 15, 35),
    "nvfp4": (0, 36, 22, 43),
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16": (0, 46, 13, 54),
}
LPQ = (str(Path(lpq.__file__).parent), str(Path(lpq.__file__).parents[1] / "plugins"))


def _quantize(x: Tensor, stats: Any, row: Any, col: Any, seed: Any, offset: int, measure: bool) -> list[Tensor]:
    rows, cols = x.shape
    sides = ((row, (rows, cols)), (col, (cols, rows)))
    return [t for q, shape in sides if q for t in q.storage.empty(q, shape, x.dtype, x.device).tensors()]


def _gemm(a: Storage, b: Storage, bias: Any, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.tensors()[0].new_empty((a.shape[0], b.shape[0]), dtype=dtype)


@pytest.fixture
def idle_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that allocate what they return."""
    made = {"quantize": _quantize, "gemm": _gemm}
    choose = bound.choose

    def chosen(op: str, operands: tuple[str, ...], device: torch.device) -> Any:
        return replace(choose(op, operands, device), impl=made[op], bind=None)

    for module in (sides, multiplying, bound):
        monkeypatch.setattr(module, "choose", chosen)
    refresh()
    yield
    refresh()


def cost(layer: nn.Module) -> tuple[int, int, int, int]:
    """The operators of lpq, all operators, the buffers allocated and lpq's calls, in one forward and backward."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)
    for _ in range(2):  # what is looked up once is looked up before
        layer(x).backward(dy)
        x.grad = None
        layer.zero_grad()
    ours, operators, allocated = _operators(lambda: layer(x).backward(dy))
    return ours, operators, allocated, _calls(lambda: layer(x).backward(dy))


def _operators(function: Callable[[], Any]) -> tuple[int, int, int]:
    """The operators of lpq, all operators, those that operators call too, and the buffers allocated."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    names = Counter(e.name for e in seen.events() if e.name.startswith(("aten::", "lpq::")))
    ours = sum(count for name, count in names.items() if name.startswith("lpq::"))
    return ours, sum(names.values()), names["aten::empty"] + names["aten::empty_strided"]


def _calls(function: Callable[[], Any]) -> int:
    """How many Python functions of lpq are called, but for what the idle kernels call."""
    count, idle = 0, 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count, idle
        if frame.f_code in (_quantize.__code__, _gemm.__code__):
            idle += {"call": 1, "return": -1}.get(event, 0)
        comprehension = frame.f_code.co_name.startswith("<")  # which is a call before Python 3.12
        if event == "call" and not idle and not comprehension and frame.f_code.co_filename.startswith(LPQ):
            count += 1

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _layer(recipe: str) -> nn.Module:
    layer = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
    return lpq.convert(layer, recipe)


@pytest.mark.usefixtures("idle_kernels")
@pytest.mark.parametrize("recipe", COSTS)
def test_no_operator_and_no_buffer_is_added(recipe: str) -> None:
    found = cost(_layer(recipe))
    assert found[0] == COSTS[recipe][0]
    assert all(now <= before for now, before in zip(found, COSTS[recipe], strict=True)), found


def test_what_is_added_is_noticed(idle_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer("fp8-current")
    before = cost(layer)
    layer[0].register_forward_pre_hook(lambda m, args: (args[0].clone(),))  # type: ignore[index]
    after = cost(layer)
    assert after[1] > before[1]
    assert after[2] > before[2]
    as_matrix = bound.as_matrix
    monkeypatch.setattr(bound, "as_matrix", lambda x: (as_matrix(x), as_matrix(x))[1])
    assert cost(layer)[3] == after[3] + 4


# ------------------------------------------------------------------------- what launches the kernels of a GPU

TOKENS, FEATURES = 4096, 2048
"""Large, as layers are."""
HOPPER, BLACKWELL = 90, 100
STEPS = 3
"""Those before what is counted, in which what is looked up once is looked up, and the one that is counted."""
LAUNCHES = {
    # recipe, hardware: all operators (as torch 2.13 counts them), buffers allocated, launches (kernels, and products of
    # torch and cuBLASLt, whose workspace is a buffer), Python calls of lpq but for the launches; from C (``native``)
    # each product of cuBLASLt takes two fewer. Exactly: where there are fewer, lower the number.
    ("fp8-current", HOPPER): (2, 20, 10, 40),
    ("fp8-delayed", HOPPER): (2, 18, 10, 55),
    ("fp8-row", HOPPER): (2, 24, 12, 38),  # the statistics of two operands are tensors of their own
    ("fp8-block", HOPPER): (2, 18, 6, 41),
    ("mxfp8", HOPPER): (5, 13, 8, 40),
    ("nvfp4", HOPPER): (12, 31, 14, 65),
    ("mxfp8", BLACKWELL): (92, 21, 6, 56),
    ("nvfp4", BLACKWELL): (158, 41, 9, 72),
}


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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A GPU whose memory is that of the CPU, and which does nothing. All that lpq does on the host is done.

    Torch's product of bf16 is idle as well: on a CPU it takes seconds, and operators of its own. What cannot be run so:
    the driver's launch itself, and ``scaled_product``, as no CPU has a product of bf16 with sums in fp32 as its result.
    It is for factors of rows, which no recipe here multiplies in bf16.
    """
    gpu = Gpu()
    where = {
        "current_device": lambda: 0, "device": lambda index: nullcontext(),
        "get_device_capability": lambda device: divmod(gpu.sm, 10),
    }  # fmt: skip
    raw = {"current_device": lambda: 0, "current_stream": lambda index: 0}
    kept = cublaslt._plan, cublaslt._handle, cublaslt._matmul, cublaslt._attribute

    def launch(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        gpu.launch(self, blocks, arguments)

    def bind(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int) -> Callable[..., None]:
        return lambda *arguments: gpu.launch(self, blocks, arguments)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return gpu.product(x.shape[0], weight.shape[0], torch.bfloat16)

    def scaled(a: Tensor, b: Tensor, *how: Any) -> Tensor:
        _, _, _, _, dtype, _ = how
        return gpu.product(a.shape[0], b.shape[1], dtype)

    def scaled_in_blocks(a: Tensor, b: Tensor, *scales: Any, output_dtype: torch.dtype, **how: Any) -> Tensor:
        return gpu.product(a.shape[0], b.shape[1], output_dtype)

    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    for name, function in where.items():
        monkeypatch.setattr(torch.cuda, name, function)
    for name, function in raw.items():
        monkeypatch.setattr(f"lpq.torch_private.cuda.{name}", function)
    monkeypatch.setattr(Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(table, "_elsewhere", gpu.elsewhere)
    monkeypatch.setattr(table, "_installed", lambda module: True)
    monkeypatch.setattr(cuda, "why_not", lambda device: None)
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", gpu.allocate)
    monkeypatch.setattr(CudaKernel, "launch", launch)
    monkeypatch.setattr(CudaKernel, "bind", bind)
    library = CublasLt(gpu)
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    for name in ("ALIGNED", "SCALED_ALIGNED"):
        monkeypatch.setattr(cublaslt, name, 1)  # to more a CPU's memory is aligned by chance
    monkeypatch.setattr("lpq_fp8.gemm.scaled_matmul", scaled)
    for module in ("lpq_fp8.gemm", "lpq_mxfp8.gemm", "lpq_nvfp4.gemm"):
        monkeypatch.setattr(f"{module}.scaled_mm", scaled_in_blocks)
    monkeypatch.setattr(nn.functional, "linear", linear)
    for function in kept:
        function.cache_clear()
    refresh()
    yield gpu
    for function in kept:
        function.cache_clear()
    refresh()


def launched(recipe: str, sm: int, gpu: Gpu) -> tuple[int, int, int, int]:
    """All operators, buffers, launches and Python calls of one forward and backward."""
    gpu.sm = sm
    refresh()
    layer = lpq.convert(nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.bfloat16)), recipe)
    x = torch.zeros(TOKENS, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(TOKENS, FEATURES, dtype=torch.bfloat16)

    def step() -> None:
        layer(x).backward(dy)

    for _ in range(STEPS - 2):
        step()
        x.grad = None
        layer.zero_grad()
    calls = _calls(step)
    x.grad = None
    layer.zero_grad()
    before = gpu.launches, gpu.allocated
    ours, operators, allocated = _operators(step)
    assert ours == 0
    return operators, allocated + gpu.allocated - before[1], gpu.launches - before[0], calls


@pytest.mark.parametrize(("recipe", "sm"), LAUNCHES)
def test_no_operator_no_buffer_no_launch_and_no_call_is_added(recipe: str, sm: int, gpu: Gpu) -> None:
    assert launched(recipe, sm, gpu) == LAUNCHES[recipe, sm]


@pytest.mark.parametrize(
    ("recipe", "sm", "place"),
    [
        ("fp8-current", HOPPER, "lpq.nn.multiply._gradients"),
        ("fp8-delayed", HOPPER, "lpq.operations.operands.recalled_by"),
        ("fp8-current", HOPPER, "lpq.kernels.cublaslt._Plan.run_scaled"),
        ("mxfp8", HOPPER, "lpq_mxfp8.tile.Made"),
        ("mxfp8", HOPPER, "lpq.emulation.bf16_gemm.product"),
        ("nvfp4", HOPPER, "lpq_nvfp4.tile.Made"),
        ("nvfp4", HOPPER, "lpq.kernels.cublaslt._Plan.run"),
        ("mxfp8", BLACKWELL, "lpq_mxfp8.cuda.Made"),
        ("mxfp8", BLACKWELL, "lpq_mxfp8.gemm.native"),
        ("nvfp4", BLACKWELL, "lpq_nvfp4.cuda.Made"),
        ("nvfp4", BLACKWELL, "lpq_nvfp4.gemm.native"),
    ],
)
def test_what_is_added_to_a_launch_is_noticed(
    recipe: str, sm: int, place: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, original = LAUNCHES[recipe, sm], pkgutil.resolve_name(place)
    spare, calls = torch.zeros(1), 0
    more: list[tuple[tuple[int, int, int], Callable[[], Any]]] = [
        ((1, 0, 0), spare.detach),
        ((2, 1, 0), lambda: spare.new_empty(1)),  # which calls ``empty``
        ((0, 1, 0), lambda: gpu.allocate((1,), (1,), torch.float32)),
        ((0, 0, 1), lambda: tiles.FINISH.launch(0, (), 1, 0, 0, 0)),
    ]

    def dearer(*args: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        also()
        return original(*args, **how)

    monkeypatch.setattr(place, dearer)
    for costs, extra in more:
        also, calls = extra, 0
        found = launched(recipe, sm, gpu)
        each, left = divmod(calls, STEPS)
        assert each > 0
        assert left == 0
        assert found[:3] == tuple(before + each * cost for before, cost in zip(usual, costs, strict=False))
