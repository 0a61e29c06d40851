"""What a linear layer costs the host, in operators and allocations and not in time, with kernels that do nothing.

A change that adds an operator or a buffer to the way from ``Linear`` to a kernel fails here. If it is worth its cost,
raise the number and say why.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
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
    # recipe: lpq's operators, all operators (nn.Linear: 29), buffers allocated for operands and results
    "fp8-current": (6, 26, 15),
    "fp8-row": (6, 26, 15),
    "mxfp8": (6, 26, 15),
    "nvfp4": (7, 43, 22),  # one draw of seeds for the layer
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16": (6, 51, 13),
}


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


def cost(layer: nn.Module) -> tuple[int, int, int]:
    """The operators of lpq, all operators, and the buffers allocated by one forward and backward."""
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
    return ours, sum(names.values()), allocated


def _layer(recipe: str) -> nn.Module:
    layer = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
    return lpq.convert(layer, recipe)


@pytest.mark.usefixtures("idle_kernels")
@pytest.mark.parametrize("recipe", COSTS)
def test_no_operator_and_no_buffer_is_added(recipe: str) -> None:
    ours, operators, buffers = cost(_layer(recipe))
    assert ours == COSTS[recipe][0]
    assert operators <= COSTS[recipe][1], operators
    assert buffers <= COSTS[recipe][2], buffers


def test_what_is_added_is_noticed(idle_kernels: None) -> None:
    layer = _layer("fp8-current")
    before = cost(layer)
    layer[0].register_forward_pre_hook(lambda m, args: (args[0].clone(),))  # type: ignore[index]
    after = cost(layer)
    assert after[1] > before[1]
    assert after[2] > before[2]
