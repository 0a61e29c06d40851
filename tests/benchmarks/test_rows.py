"""Rows are stored one after the other, and a run that was cut off goes on; blocks run again in backward as asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import lpq
from benchmarks import recomputing
from benchmarks.rows import CUT, OtherSetting, Row, Task, one_by_one

WIDTH, LAYERS = 32, 4


def task(name: str, ran: list[str]) -> Task:
    def run() -> Row:
        ran.append(name)
        return {"ms": float(len(ran)), "failure": None}

    return Task({"library": "lpq", "recipe": name, "compiled": False}, run)


def test_a_row_stands_as_cut_off_while_it_is_measured() -> None:
    ran: list[str] = []
    seen = [[row["failure"] for row in found["results"]] for found in one_by_one([task("a", ran), task("b", ran)], {})]
    assert seen == [[CUT], [None], [None, CUT], [None, None], [None, None]]


def test_a_run_goes_on_and_what_was_cut_off_comes_last() -> None:
    ran: list[str] = []
    tasks = [task(name, ran) for name in "abcd"]
    of = one_by_one(tasks, {"ranks": 2})
    *_, before = (next(of) for _ in range(3))
    assert [row["failure"] for row in before["results"]] == [None, CUT]  # b ended the run
    before["results"].append({"library": "lpq", "recipe": "other", "compiled": False, "ms": 7.0, "failure": None})
    before["results"].append({"library": "lpq", "recipe": "c", "compiled": False, "failure": "out of memory"})
    *_, result = one_by_one(tasks, {"ranks": 2}, before)
    assert ran == ["a", "d", "b"]
    assert [row["recipe"] for row in result["results"]] == ["a", "b", "other", "c", "d"]
    assert [row.get("ms") for row in result["results"]] == [1.0, 3.0, 7.0, None, 2.0]
    with pytest.raises(OtherSetting, match="differ in ranks"):
        next(one_by_one(tasks, {"ranks": 4}, before))


class Counting(TorchDispatchMode):
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in recomputing.PRODUCTS:
            self.seen["products"] += 1
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Layers, and what is cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def gradients(recipe: str | None, way: str, backend: Any = None) -> list[Tensor]:
    """Gradients of the input and the weights, after a step of the net, which ``backend`` compiles."""
    torch.manual_seed(0)
    net = Net()
    if recipe is not None:
        lpq.convert(net, recipe, include="all")
    wrapped = recomputing.wrapped(net, way)
    if backend is not None:
        torch._dynamo.reset()
        wrapped.compile(backend=backend, fullgraph=True, dynamic=False)
    x = torch.randn(64, WIDTH, requires_grad=True)
    wrapped(x).square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]  # type: ignore[list-item]


MORE = {recomputing.NONE: 0, recomputing.SELECTIVE: LAYERS // 2, recomputing.FULL: LAYERS}
"""Products that run again."""


@pytest.mark.parametrize("recipe", [None, "fp8-current", "fp8-delayed"])
def test_every_second_product_runs_again(recipe: str | None) -> None:
    expected = gradients(recipe, recomputing.NONE)
    for way, more in MORE.items():
        with Counting() as mode:
            found = gradients(recipe, way)
        assert 3 * LAYERS + more - mode.seen["products"] in ((0,) if more == 0 else (0, 1))  # torch stops early
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


OLD = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 runs no product of lpq again there")


@pytest.mark.parametrize("recipe", [None, pytest.param("fp8-current", marks=OLD)])
def test_compiled_blocks_run_as_much_again(recipe: str | None) -> None:
    def counting(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        made.extend(node for node in graph.graph.nodes if node.target in recomputing.PRODUCTS)
        return make_boxed_func(graph)

    cut = min_cut_rematerialization_partition  # as Inductor cuts what runs again
    backend = aot_autograd(fw_compiler=counting, bw_compiler=counting, partition_fn=cut)
    for way, more in MORE.items():
        made: list[Any] = []
        gradients(recipe, way, backend)
        assert len(made) == 3 * LAYERS + more
