"""How many functions of lpq Dynamo traces where it compiles one layer: each costs about a millisecond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import imitated_ranks, mesh_of
from support.small_models import converted
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp

TRACED = {"fp8-current": 18, "mxfp8": 18, "nvfp4": 21, "fp8-delayed": 26}
"""At most so many, forward and backward together; each number may only fall."""
GROUPS, EXPORT = 22, 27
"""The same of a layer of groups and, forward alone, of an export, with fp8-current."""
SHARED_OUT = 107, 184
"""The same of two layers that ranks share out, whose activations all ranks have, and whose sequences ranks divide."""


def traced(step: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of lpq that Dynamo traces in what is called."""
    found: list[str] = []
    usual = InliningInstructionTranslator.build_inline_tracer

    def build(parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        code = func.get_code()
        if "lpq" in str(func.get_globals().get("__name__")):
            found.append(code.co_name)
        return usual(parent, func, *args, **kwargs)

    monkeypatch.setattr(InliningInstructionTranslator, "build_inline_tracer", staticmethod(build))
    torch._dynamo.reset()
    step()
    return found


def steps(layer: nn.Module, *inputs: Tensor, rest: tuple[Any, ...] = ()) -> Callable[[], None]:
    """A step of a compiled layer with each of these inputs."""
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def run() -> None:
        for x in inputs:
            compiled(x.requires_grad_(), *rest).sum().backward()

    return run


@pytest.mark.parametrize("recipe", TRACED)
def test_cost_of_tracing_a_layer(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced(steps(converted(recipe, 64, 64), torch.randn(64, 64)), monkeypatch)
    assert {"forward", "backward"} <= set(found)  # all is counted
    assert len(found) <= TRACED[recipe], sorted(found)


def test_cost_of_sizes_that_change_is_one_more_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(count, 64) for count in (64, 48, 32, 80)]
    found = traced(steps(converted("fp8-current", 64, 64), *inputs), monkeypatch)
    assert found.count("backward") == 2
    assert len(found) <= 2 * TRACED["fp8-current"] + 20, sorted(found)


def test_cost_of_tracing_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    layer = lpq.nn.GroupedLinear(4, 64, 64, bias=False, recipe="fp8-current")
    found = traced(steps(layer, torch.randn(64, 64), rest=(ends,)), monkeypatch)
    assert {"forward", "backward"} <= set(found)
    assert len(found) <= GROUPS, sorted(found)


def test_cost_of_tracing_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = converted("fp8-current", 64, 64), torch.randn(64, 64)
    found = traced(lambda: torch.export.export(layer, (x,), strict=True), monkeypatch)
    assert "forward" in found
    assert len(found) <= EXPORT, sorted(found)


def test_cost_of_tracing_layers_that_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations that all ranks have, and with sequences that are shared out."""
    columns = tp.ColwiseParallel(), tp.ColwiseParallel(input_layouts=Shard(0))
    rows = tp.RowwiseParallel(), tp.RowwiseParallel(output_layouts=Shard(0))
    with imitated_ranks():
        for column, row, most in zip(columns, rows, SHARED_OUT, strict=True):
            pair = converted("fp8-current", 64, 64, 64, bias=False)
            parallelize_module(pair, mesh_of(), {"0": column, "1": row})
            found = traced(steps(pair, torch.randn(64, 64)), monkeypatch)
            assert found.count("backward") == 2
            assert len(found) <= most, sorted(found)
        torch._dynamo.reset()
