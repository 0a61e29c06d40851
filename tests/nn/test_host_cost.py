"""What a linear layer costs the host: calls, operators and buffers, and not time, with kernels that do nothing.

A change that adds a function call, an operator or a buffer to the way from ``Linear`` to a kernel fails here. If it is
worth its cost, raise the number and say why.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lpq
from lpq.core import operations
from lpq.core.storage import Storage

SIZE = 128
COSTS = {
    # recipe: lpq's operators, all operators (nn.Linear: 29), buffers allocated for operands and results, Python calls
    "fp8-current": (0, 20, 15, 83),
    "fp8-row": (0, 20, 15, 83),
    "mxfp8": (0, 20, 15, 95),
    "nvfp4": (0, 36, 22, 98),
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16": (0, 45, 13, 106),
}
LPQ = (str(Path(lpq.__file__).parent), str(Path(lpq.__file__).parents[1] / "plugins"))


def _quantize(x: Tensor, stats: Any, row: Any, col: Any, seed: Any, offset: int, measure: bool) -> list[Tensor]:
    rows, cols = x.shape
    sides = ((row, (rows, cols)), (col, (cols, rows)))
    return [t for q, shape in sides if q for t in q.storage.empty(q, shape, x.dtype, x.device).tensors()]


def _gemm(a: Storage, b: Storage, bias: Any, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.tensors()[0].new_empty((a.shape[0], b.shape[0]), dtype=dtype)


@pytest.fixture
def idle_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that allocate what they return."""
    made = {"quantize": _quantize, "gemm": _gemm}
    choose = operations.choose

    def chosen(op: str, operands: tuple[str, ...], device: torch.device) -> Any:
        return replace(choose(op, operands, device), impl=made[op])

    monkeypatch.setattr(operations, "choose", chosen)


def cost(layer: nn.Module) -> tuple[int, int, int, int]:
    """The operators of lpq, all operators, the buffers allocated and lpq's calls, in one forward and backward."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)
    for _ in range(2):  # what is looked up once is looked up before
        layer(x).backward(dy)
        x.grad = None
        layer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(x).backward(dy)
    names = Counter(e.name for e in seen.events() if e.name.startswith(("aten::", "lpq::")))
    ours = sum(count for name, count in names.items() if name.startswith("lpq::"))
    allocated = names["aten::empty"] + names["aten::empty_strided"]
    return ours, sum(names.values()), allocated, _calls(lambda: layer(x).backward(dy))


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
    gemm = lpq.nn.linear.gemm
    monkeypatch.setattr(lpq.nn.linear, "gemm", lambda a, b, **how: (a.tensors(), gemm(a, b, **how))[1])
    assert cost(layer)[3] == after[3] + 3
