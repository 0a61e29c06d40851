"""How many functions of lpq Dynamo traces where it compiles one layer: each costs about a millisecond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.small_models import converted
from torch._dynamo.symbolic_convert import InliningInstructionTranslator

TRACED = {"fp8-current": 50, "mxfp8": 50, "nvfp4": 51, "fp8-delayed": 97}
"""At most so many, forward and backward together; each number may only fall."""


def traced(recipe: str, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...] = (64,)) -> list[str]:
    """The functions of lpq that Dynamo traces in a step with each number of rows."""
    found: list[str] = []
    usual = InliningInstructionTranslator.build_inline_tracer

    def build(parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        code = func.get_code()
        if "lpq" in str(func.get_globals().get("__name__")):
            found.append(code.co_name)
        return usual(parent, func, *args, **kwargs)

    monkeypatch.setattr(InliningInstructionTranslator, "build_inline_tracer", staticmethod(build))
    torch._dynamo.reset()
    layer = torch.compile(converted(recipe, 64, 64), backend="aot_eager", fullgraph=True)
    for count in rows:
        layer(torch.randn(count, 64, requires_grad=True)).sum().backward()
    return found


@pytest.mark.parametrize("recipe", TRACED)
def test_cost_of_tracing_a_layer(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced(recipe, monkeypatch)
    assert {"forward", "backward"} <= set(found)  # all is counted
    assert len(found) <= TRACED[recipe], sorted(found)


def test_cost_of_sizes_that_change_is_one_more_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced("fp8-current", monkeypatch, (64, 48, 32, 80))
    assert found.count("backward") == 2
    assert len(found) <= 2 * TRACED["fp8-current"] + 20, sorted(found)
