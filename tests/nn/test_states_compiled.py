"""Compiled layers that remember, run forward several times before a backward, which moves their states: all encode by
the states that forward saw, as layers do that are not compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.comparing import equal
from support.passes import Run, plainly, recomputed
from support.small_models import converted
from torch import Tensor

import lpq
from lpq.nn.plan import Plan

pytestmark = pytest.mark.usefixtures("no_storm")
MOVING = [name for name in sorted(lpq.registry.recipes()) if Plan.of(lpq.recipe(name)).moving]
OF_ROWS = "hybrid(row=fp8(scaling=delayed), col=fp8(scaling=delayed, dtype=e5m2), col_source=row)"
"""Both operands remember, and one is made of the other."""
RECIPES = (*MOVING, f"x={OF_ROWS}, w={OF_ROWS}, dy=fp8(scaling=delayed)")


def several(recipe: str, run: Run) -> list[Tensor]:
    """The outputs and gradients of three forwards, the third of which comes between the backwards of the others, and
    the states behind them."""
    layer, outputs = converted(recipe, 64, 64)[0], []
    layer(torch.ones(64, 64)).sum().backward()
    torch.optim.SGD(layer.parameters()).step()  # no state is fresh any longer
    torch.manual_seed(3)
    inputs = [(torch.randn(64, 64) * 4**i).requires_grad_() for i in range(3)]
    for forward, backward in ((0, None), (1, 0), (2, 1), (None, 2)):
        outputs += [] if forward is None else [run(layer, inputs[forward])]
        if backward is not None:
            outputs[backward].backward(torch.sin(inputs[backward].detach()) * 4**backward)
    gradients = [tensor.grad for tensor in (*inputs, *layer.parameters())]
    return [*(y.detach() for y in outputs), *(g for g in gradients if g is not None), *layer.buffers()]


@pytest.mark.parametrize("run", [plainly, recomputed])
@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_runs_several_times_before_a_backward(recipe: str, run: Any) -> None:
    """Checkpointing, too, uses the states that forward saw at first, as it saves them."""
    torch._dynamo.reset()
    found = several(recipe, torch.compile(partial(run), fullgraph=True, backend="aot_eager"))
    assert equal(found, several(recipe, plainly))
    assert len(found) > 8  # states are among them


def test_recipes_that_remember_are_found() -> None:
    assert {"fp8-delayed", "nvfp4-eden-delayed"} <= set(MOVING)
