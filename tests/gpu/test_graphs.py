"""A layer that was recorded in CUDA graphs, or compiled to them, does what it does by itself, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq

RECIPES = [
    "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "mxfp4(scale=even)", "nvfp4(block=16x16)",
    "hybrid(row=mxfp8, col=nvfp4)",
]  # fmt: skip
SIZE, STEPS = 128, 5


def recorded(layer: nn.Module) -> Any:
    return torch.cuda.make_graphed_callables(layer, (torch.randn(SIZE, SIZE, device="cuda", requires_grad=True),))


def compiled(layer: nn.Module) -> Any:
    return torch.compile(layer, fullgraph=True, mode="reduce-overhead")


def run(module: Callable[[Tensor], Tensor], layer: nn.Linear) -> list[Tensor]:
    """Output, both gradients and the state of each step; the weight moves in between, and inputs grow."""
    found: list[Tensor] = []
    g = torch.Generator("cuda").manual_seed(1)
    for step in range(STEPS):
        x = (torch.randn(SIZE, SIZE, device="cuda", generator=g) * (step + 1)).requires_grad_()
        y = module(x)
        y.backward(torch.randn(SIZE, SIZE, device="cuda", generator=g))
        assert x.grad is not None
        assert layer.weight.grad is not None
        found += [t.clone() for t in (y.detach(), x.grad, layer.weight.grad, *layer.buffers())]
        with torch.no_grad():
            layer.weight.add_(layer.weight.grad, alpha=-1e-3)
        layer.weight.grad = None
    return found


def made(recipe: str) -> nn.Linear:
    torch.manual_seed(0)
    return lpq.nn.Linear(SIZE, SIZE, bias=False, device="cuda", recipe=recipe)  # a compiler sums in its own order


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("record", [recorded, compiled])
def test_the_steps_are_the_same(record: Callable[[nn.Module], Any], recipe: str) -> None:
    plain, layer = made(recipe), made(recipe)
    module = record(layer)
    with torch.no_grad():  # recording runs some steps
        for buffer in layer.buffers():
            buffer.zero_()
    expected, got = run(plain, plain), run(module, layer)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(expected[0], expected[len(expected) // STEPS])  # steps differ


def test_random_bits_are_drawn_anew_at_each_replay() -> None:
    """Else gradients that are rounded stochastically would be biased for ever."""
    module = recorded(made("nvfp4"))
    x, dy = torch.randn(SIZE, SIZE, device="cuda", requires_grad=True), torch.randn(SIZE, SIZE, device="cuda")
    gradients = []
    for _ in range(2):
        module(x).backward(dy)
        assert x.grad is not None
        gradients.append(x.grad.clone())
        x.grad = None
    assert not torch.equal(*gradients)
