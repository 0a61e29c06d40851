"""Rows are stored one after the other, and a run that was cut off goes on; blocks run again in backward as asked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
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


def products(recipe: str | None, way: str, compiled: bool = False) -> tuple[int, list[torch.Tensor]]:
    """How many products forward, what runs of it again, and backward make; and the gradients."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    block = nn.Sequential(*layers)
    if recipe is not None:
        lpq.convert(block, recipe, include="all")
    wrapped = recomputing.wrapped(block, way)
    if compiled:
        wrapped.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    x = torch.randn(64, WIDTH, requires_grad=True)
    with Counting() as mode:
        wrapped(x).square().sum().backward()
    return mode.seen["products"], [x.grad.clone(), *(p.grad for p in block.parameters())]  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", [None, "fp8-current", "fp8-delayed"])
def test_every_second_product_runs_again(recipe: str | None) -> None:
    plain, expected = products(recipe, recomputing.NONE)
    assert plain == 3 * LAYERS
    for way, more in ((recomputing.SELECTIVE, LAYERS // 2), (recomputing.FULL, LAYERS)):
        made, gradients = products(recipe, way)
        assert made in (plain + more, plain + more - 1)  # the last product is not needed again: torch stops early
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
